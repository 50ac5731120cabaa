"""Credits of Perturn inside other trainers: one module a host, and what the hosts have in common.

A host hands over tokens, masks and rewards; `host_batches` makes turns of them, and tokens of the numbers of turns.
Nothing of a host is imported before its module is.
"""
