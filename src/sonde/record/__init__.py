"""Record a training: taps see tensors, kernels summarise them, the packer packs a step, the worker writes it.

`pipeline` wires these together and knows them all; the others know only the plain types between them.
"""
