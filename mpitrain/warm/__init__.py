"""Ranks that start in a quarter of the time: forks of one that has imported torch.

    fork_server     one process of a node: imports torch, listens, forks
    proxy           in the process that mpirun started: asks, and stands for the fork
    process_state   what the proxy hands on, and what must be equal

The proxy is what the launcher knows: it passes signals on, and ends as the fork ends.
"""
