"""The method on upstream verl, without a fork.

`plugin` registers the losses in every process that imports verl, `losses` unpacks verl's tensors and calls `algo.signal`,
`params` is the channel of the method's parameters, `hook` computes what must be known before a batch is split (`trainer` calls
it), `main` is the program that runs. See docs/cluster.md.
"""
