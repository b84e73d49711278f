"""What a run leaves behind: the files of its run folder, and who writes them.

    .lock                   `runs`: locked by the job that writes into the folder
    run.json                `runs`: the run's id, of all its jobs
    metrics.jsonl           `recorder`, on rank zero; `reading` reads it
    inputs.json             `recorder`, on rank zero
    result.json             `recorder`; of a failure `result`, on the rank that knows it
    costs.json              `cost`, on rank zero
    fingerprints.jsonl      `fingerprints`, on rank zero
    times/rank-N.jsonl      `rank_times`, on each rank
    profile/rank-N.*        `profiler`, on each rank
    logs/rank-N.log         `run_dir`, on each rank
    restarts.jsonl          `supervised`, in `supervise`

Lines (``*.jsonl``, logs) go through `background`: no disk holds a training up.
"""
