"""What only we measure: kernels, single parts, GPUs, and Tandem beside other servers. Not in the wheel."""
