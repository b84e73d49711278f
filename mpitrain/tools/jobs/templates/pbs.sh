{% extends "base.sh" %}
{% set account_line = "#PBS -A " %}
{% block usage %}
#     qsub THIS_SCRIPT                           {{ from_where }}
{% if not is_check %}
#     qsub -v ARGS="{{ "--lr 0.1" if is_script else "--epochs 20" }}" THIS_SCRIPT     more {{ "arguments for your script" if is_script else "flags for mpitrain" }}
{% endif %}
{% if jobs > 1 and not is_script %}
#     qsub -N OTHER THIS_SCRIPT                  another training: its run has this name
{% endif %}
{% endblock %}
{% block job %}
# The name in the queue. One output file, normal and error alike: {{ name }}.o<number>.
#PBS -N {{ name }}
#PBS -j oe
{% if queue %}
#PBS -q {{ queue }}
{% endif %}
# Time limit (hours:minutes:seconds).
#PBS -l walltime={{ time }}
{% if jobs > 1 %}
# PBS may run the job again if a node fails.
#PBS -r y
{% if spare_nodes %}
# A node that fails does not end the job: the training resumes on the others.
#PBS -W tolerate_node_failures=all
{% endif %}
{% endif %}
{% if mail %}
#PBS -M {{ mail }}
#PBS -m ae
{% endif %}
{% endblock %}
{% block nodes %}
# Chunks, each on a node of its own, with cores, GPUs and memory. mpiprocs is the number
# of processes (ranks), ompthreads the number of threads of each. Without mpiprocs there
# is one slot; without ompthreads each process would take all cores.
#PBS -l place=scatter
#PBS -l select={{ all_nodes }}:ncpus={{ slots_per_node * cpus_per_slot }}:mpiprocs={{ slots_per_node }}:ompthreads={{ cpus_per_slot }}{{ ":ngpus=" ~ gpus if gpus else "" }}{{ ":mem=" ~ mem | lower ~ "b" if mem else "" }}
{% if gpus %}
# On a CPU queue, or if PBS says "Unknown resource: ngpus", DELETE the line above and
# remove one # here:
##PBS -l select={{ all_nodes }}:ncpus={{ slots_per_node * cpus_per_slot }}:mpiprocs={{ slots_per_node }}:ompthreads={{ cpus_per_slot }}{{ ":mem=" ~ mem | lower ~ "b" if mem else "" }}
{% endif %}
{% endblock %}
{% block submit_dir %}
# The virtual environment. PBS starts the script in $HOME.
cd "$PBS_O_WORKDIR"
{% endblock %}
{% block openmpi %}

# An Open MPI that was built for PBS ("tm") gets the nodes from PBS. Any other reads them
# from a file, {{ "which `supervise` gives it" if jobs > 1 else "one line for each slot" }}, and reaches them by ssh, with the variables of -x.
launchers=$(prte_info 2>/dev/null || ompi_info 2>/dev/null || true)
if [[ $launchers != *"MCA plm: tm "* ]]; then
{% if jobs == 1 %}
    options+=(--hostfile "$PBS_NODEFILE")
{% endif %}
    for name in PATH LD_LIBRARY_PATH OMP_NUM_THREADS; do
        if [[ -n ${!name:-} ]]; then options+=(-x "$name"); fi
    done
    # Without ssh between the nodes PBS's own pbs_tmrsh takes its place.
    remote_shell=ssh
    here=$(head -n 1 "$PBS_NODEFILE")
    other=$(grep -Fxvm 1 "$here" "$PBS_NODEFILE" || true)
    if [[ -n $other ]] && ! timeout 20 ssh -n -o BatchMode=yes "$other" true; then
        home=$(sed -n 's/^PBS_EXEC=//p' "${PBS_CONF_FILE:-/etc/pbs.conf}" || true)
        export PATH="$PATH:$home/bin"
        if ! remote_shell=$(command -v pbs_tmrsh); then
            echo "cannot reach $other: no ssh, and no pbs_tmrsh either" >&2
            exit 1
        fi
        echo "no ssh to $other: mpirun takes $remote_shell instead"
        remote_shell=pbs_tmrsh
    fi
    # PBS sends TERM to these, too; mpirun would lose the node. (Open MPI 5, then 4.)
    agent="python -m mpitrain.tools.jobs.block_sigterm $remote_shell"
    export PRTE_MCA_plm_ssh_agent=$agent OMPI_MCA_plm_rsh_agent=$agent
    export PRTE_MCA_plm_ssh_no_tree_spawn=1 OMPI_MCA_plm_rsh_no_tree_spawn=1
fi
{% endblock %}
{% block start %}
# This script runs once, on the first node. ARGS is several words.
#
# `supervise` lets the ranks stop with a checkpoint at TERM (qdel, preemption). It ends
# with 75; qstat says 271 after qdel.
{% if jobs == 1 and restarts %}
# After a fault it starts them again, up to {{ restarts }} times.
{% endif %}
{% if jobs == 1 %}
# shellcheck disable=SC2086
exec python -m mpitrain supervise {{ '--container "${container[*]@Q}" ' if container and restarts }}{{ "--launcher %s " % launcher if launcher != "openmpi" else "" }}{{ "--restarts %d " % restarts if restarts }}{{ "--warm " if warm and restarts }}-- \
    {{ program }} {{ '"${options[@]}" ' if options }}{{ '"${container[@]}" ' if container and not restarts }}python -m mpitrain{{ command }}{{ words }} ${ARGS:-}
{% else %}
#
# It {{ "leaves out nodes that do not answer, and " if can_choose }}submits this script again until the
# training is finished, up to {{ jobs }} jobs.{{ '' if run_dir else " The run, or sweep, has the job's name." }}
# The next job gets only ARGS and -N of qsub's command line (ARGS encoded, where qsub
# would change it): write other options for PBS into this script.
export ARGS="${ARGS:-$(base64 -d <<<"${MPITRAIN_ARGS:-}")}"
# shellcheck disable=SC2086
exec python -m mpitrain supervise {{ '--container "${container[*]@Q}" ' if container }}{{ "--launcher %s " % launcher if launcher != "openmpi" else "" }}--jobs {{ jobs }}{{ " --restarts %d" % restarts if restarts is not none }}{{ " --run-dir " ~ run_dir if run_dir }}{{ " --nodes %d" % nodes if spare_nodes else "" }}{{ " --warm" if warm }} --script "$0" -- \
    {{ program }} {{ '"${options[@]}" ' if options }}python -m mpitrain{{ command }}{{ '' if run_dir else ' --name "$PBS_JOBNAME"' }}{{ words }} ${ARGS:-}
{% endif %}
{% endblock %}
