"""The attention function lent to the models of `transformers`, and the plain reference that every kernel is
tested against.
"""
