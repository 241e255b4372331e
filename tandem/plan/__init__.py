"""`tandem plan`: what a model needs of which machines, by arithmetic and by simulation."""
