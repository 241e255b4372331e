"""What tests of several rooms share: a cluster of real cores in virtual time, and what it stands on."""
