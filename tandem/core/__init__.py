"""The ground floor: what every process knows, without wire, tensors or Ray: configuration, errors, states, page
accounting, text.
"""
