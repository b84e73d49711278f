"""Which cores, threads and GPU each rank gets."""
