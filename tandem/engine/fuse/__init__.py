"""Finds the parts of a model that fewer kernels can compute, and tries each replacement before it is used; for
any device.
"""
