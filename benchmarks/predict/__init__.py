"""The simulator held against its own cluster: calibrated on two loads, and asked what others will do."""
