"""Each kernel alone, against what the threads of this machine can do."""
