"""Credits of Perturn inside other trainers: one module per host, and the code that the hosts share.

A host hands over tokens, masks and rewards; `host_batches` makes turns of them, and tokens of the numbers of turns.
Nothing of a host is imported before its module is.
"""
