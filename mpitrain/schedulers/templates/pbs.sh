#!/bin/bash -l
# {{title}}, under PBS:
#
#     qsub THIS_SCRIPT                           {{from}}
#     qsub -v ARGS="--epochs 20" THIS_SCRIPT     ARGS goes to mpitrain
{{another}}
#
# `-l` above makes this a login shell, so that `module` is known. This text is
# made by `python -m mpitrain jobscript pbs{{jobs_flag}}`: {{help}}

{{account}}

# The name in the queue.
#PBS -N {{name}}
# One file for what is printed, normal and error alike: {{name}}.o<number>.
#PBS -j oe
{{queue}}
# The job is ended after this time (hours:minutes:seconds).
#PBS -l walltime={{time}}
{{chain_lines}}
# So many pieces (chunks), each on a node of its own ...
#PBS -l place=scatter
# ... with cores, GPUs and memory. mpiprocs is the number of processes (ranks),
# ompthreads that of the threads of each. Without mpiprocs there is room for one
# process, and mpirun wants --oversubscribe; without ompthreads each process would
# take all cores.
{{select}}

set -eo pipefail

{{modules}}
set -u  # only now: some sites' modules use variables that are not set
# ... then the virtual environment. PBS starts in $HOME, hence `cd`.
cd "$PBS_O_WORKDIR"
venv={{venv}}
if [[ ! -x $venv/bin/python ]]; then
    echo "no virtual environment in $venv: make it, or submit from its folder" >&2
    exit 1
fi
export PATH="$venv/bin:$PATH"

# Now `mpirun` is the one in .venv if there is one, else the module's. The one
# in .venv has to be told where it lives on the other nodes: in the same place.
options=(--bind-to none)  # threads may use all cores; mpitrain shares them out
if [[ -x $venv/bin/mpirun ]]; then
    options+=(--prefix "$venv")
fi

# How does mpirun reach the other nodes? An Open MPI built for PBS ("tm") asks
# PBS for nodes and slots, and has PBS start the others.
launchers=$(prte_info 2>/dev/null || ompi_info 2>/dev/null || true)
if [[ $launchers != *"MCA plm: tm "* ]]; then
    # Any other reads the nodes from a file, one line for each slot, and sends
    # itself by ssh. Of our environment only what -x names goes along.
{{nodefile}}
    for name in PATH LD_LIBRARY_PATH OMP_NUM_THREADS; do
        if [[ -n ${!name:-} ]]; then options+=(-x "$name"); fi
    done
    # No ssh between the nodes? Then PBS's own pbs_tmrsh in its place. It wants
    # the command as separate words, and mpirun gives it as one: hence `sh -c`.
    here=$(head -n 1 "$PBS_NODEFILE")
    other=$(grep -Fxvm 1 "$here" "$PBS_NODEFILE" || true)
    if [[ -n $other ]]; then
        reach=ssh shell=
        if ! timeout 20 ssh -n -o BatchMode=yes "$other" true; then
            home=$(sed -n 's/^PBS_EXEC=//p' "${PBS_CONF_FILE:-/etc/pbs.conf}" || true)
            reach=$(command -v pbs_tmrsh || echo "$home/bin/pbs_tmrsh")
            shell='/bin/sh -c '
            if [[ ! -x $reach ]]; then
                echo "cannot reach $other: no ssh, and no pbs_tmrsh either" >&2
                exit 1
            fi
            echo "no ssh to $other: mpirun takes $reach instead"
        fi
        # PBS sends TERM to ssh and pbs_tmrsh, too. mpirun would lose the node: so TERM
        # is blocked for them.
        agent=$(mktemp "${TMPDIR:-/tmp}/agent.XXXXXX")
        trap 'rm -f "$agent"' EXIT
        cat >"$agent" <<EOF
#!/bin/sh
host=\$1; shift
exec $(printf %q "$venv")/bin/python -m mpitrain.schedulers.block_sigterm \\
    $(printf %q "$reach") "\$host" $shell"\$*"
EOF
        chmod +x "$agent"
        # One name for Open MPI 5, one for 4; all nodes started from this one.
        export PRTE_MCA_plm_ssh_agent=$agent OMPI_MCA_plm_rsh_agent=$agent
        export PRTE_MCA_plm_ssh_no_tree_spawn=1 OMPI_MCA_plm_rsh_no_tree_spawn=1
    fi
fi
{{train}}