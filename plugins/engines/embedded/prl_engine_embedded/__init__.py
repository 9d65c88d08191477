"""The embedded engine: a Hugging Face causal language model served by a process of its own.

`plugin` declares it, `client` is the half that gateway and controller use (no torch), `server` the process,
`fixed` and `continuous` the two schedulers, `weights` what copies new parameters into the model and back.
"""
