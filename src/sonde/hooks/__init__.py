"""The only package that registers torch hooks and replaces torch functions.

- `on_call`: calls of modules, and of one module;
- `on_step`: optimizer steps;
- `on_backward`: backward passes, gradients of tensors, gradients accumulated into parameters;
- `replace_function`: functions of torch that have no hook;
- `guard`: what every callback is wrapped in, and how hooks are removed.

Callbacks return nothing and so never replace a value; what alters a value on purpose is named `replace_...`. Under
`torch.compile` no callback runs.
"""
