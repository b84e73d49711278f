# 75: stopped, and the same training with its --name resumes. mpirun of Open MPI 5 ends
# with 0 where it has lost a node: the job's status is then that of rank zero, or 1.
if [[ $status == 0 ]]; then status=$(cat "$MPITRAIN_STATUS_FILE"); fi
rm -f "$MPITRAIN_STATUS_FILE"
exit "${status:-1}"
