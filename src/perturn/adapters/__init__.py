"""Use Perturn's credits in other training libraries ("hosts"), with one module per host.

A host passes tokens, masks and rewards. `host_batches` splits them into turns, has the credit weigh the turns, and
writes the weights back to the tokens. A host's library is imported only by its own module.
"""
