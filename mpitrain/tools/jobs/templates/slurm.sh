{% extends "base.sh" %}
{% set account_line = "#SBATCH --account=" %}
{% block usage %}
#     sbatch THIS_SCRIPT                   {{ from_where }}
{% if not is_check %}
#     sbatch THIS_SCRIPT {{ "--lr 0.1   " if is_script else "--epochs 20" }}       more {{ "arguments for your script" if is_script else "flags for mpitrain" }}
{% endif %}
{% if jobs > 1 and not is_script %}
#     sbatch --job-name OTHER THIS_SCRIPT  another training: its run has this name
{% endif %}
{% endblock %}
{% block job %}
# The name in the queue, and the output file: %x is the name, %j the job's number.
#SBATCH --job-name={{ name }}
#SBATCH --output=%x-%j.log
{% if partition %}
#SBATCH --partition={{ partition }}
{% endif %}
# Time limit (hours:minutes:seconds).
#SBATCH --time={{ time }}
{% if jobs > 1 %}
# The job returns to the queue, appends to its output, and gets USR1 before its end.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@{{ notice }}
{% if spare_nodes %}
# A node that fails does not end the job: the training resumes on the others.
#SBATCH --no-kill
{% endif %}
{% endif %}
{% if mail %}
#SBATCH --mail-user={{ mail }}
#SBATCH --mail-type=END,FAIL
{% endif %}
{% endblock %}
{% block nodes %}
# Nodes, processes (ranks) on each{{ " (one for each GPU)" if slots_per_node == gpus else "" }}, and cores of each process.
#SBATCH --nodes={{ all_nodes }}
#SBATCH --ntasks-per-node={{ slots_per_node }}
#SBATCH --cpus-per-task={{ cpus_per_slot }}
{% if mem %}
# Memory of each node.
#SBATCH --mem={{ mem }}
{% endif %}
{% if gpus %}
# GPUs of each node. On a CPU partition DELETE this line.
#SBATCH --gres=gpu:{{ gpus }}
{% endif %}
{% endblock %}
{% block submit_dir %}
# The virtual environment.
cd "$SLURM_SUBMIT_DIR"
{% endblock %}
{% block environment %}
{% if launcher == "srun" %}
# If ranks find themselves alone: --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH
# (srun --mpi=list).
{% else %}
# sbatch --export=NONE, or a list of variables, sets this one, too: the ranks of other
# nodes would then have no PATH.
export SLURM_EXPORT_ENV=ALL

{% endif %}
{% endblock %}
{% block openmpi %}
# The daemons on the other nodes must not end at TERM. (Open MPI 5, then 4.)
agent="python -m mpitrain.tools.jobs.block_sigterm"
export PRTE_MCA_prte_launch_agent="$agent prted"
export OMPI_MCA_orte_launch_agent="$agent orted"
{% endblock %}
{% block start %}
# This script runs once, on the first node. {{ program }} gets nodes and slots from SLURM.
#
{% if launcher != "ibrun" %}
# `supervise` lets the ranks stop with a checkpoint at TERM (scancel, preemption). Then
# the job's status is 75.
{% else %}
# Before the time limit the ranks stop with a checkpoint. Then the job's status is 75.
{% endif %}
{% if jobs == 1 and restarts %}
# After a fault it starts them again, up to {{ restarts }} times.
export SLURM_OVERLAP=1  # srun does not wait for what is left of a lost node
{% endif %}
{% if jobs == 1 %}
exec python -m mpitrain supervise {{ '--container "${container[*]@Q}" ' if container and restarts }}{{ "--launcher %s " % launcher if launcher != "openmpi" else "" }}{{ "--restarts %d " % restarts if restarts }}{{ "--warm " if warm and restarts }}-- \
    {{ program }} {{ '"${options[@]}" ' if options }}{{ '"${container[@]}" ' if container and not restarts }}python -m mpitrain{{ command }}{{ words }} "$@"
{% else %}
#
# It {{ "leaves out nodes that do not answer, and " if can_choose }}requeues the job until the training is
# finished, up to {{ jobs }} jobs.{{ '' if run_dir else " The run, or sweep, has the job's name." }}
export SLURM_OVERLAP=1  # srun does not wait for what is left of a lost node
exec python -m mpitrain supervise {{ '--container "${container[*]@Q}" ' if container }}{{ "--launcher %s " % launcher if launcher != "openmpi" else "" }}--jobs {{ jobs }}{{ " --restarts %d" % restarts if restarts is not none }}{{ " --run-dir " ~ run_dir if run_dir }}{{ " --nodes %d" % nodes if spare_nodes else "" }}{{ " --warm" if warm }} -- \
    {{ program }} {{ '"${options[@]}" ' if options }}python -m mpitrain{{ command }}{{ '' if run_dir else ' --name "$SLURM_JOB_NAME"' }}{{ words }} "$@"
{% endif %}
{% endblock %}
