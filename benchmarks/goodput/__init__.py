"""Goodput on mixes of short and long prompts: the highest rate of requests that nearly all are served well."""
