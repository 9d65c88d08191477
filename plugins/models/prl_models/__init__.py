"""Models that train on packed documents.

plugin.py     the declarations
provider.py   the protocols of the kind `prl.models`, and the choice of a provider by name
options.py    how a model is built
batch.py      what a model is given: a packed row on its device
flops.py      the operations of a training step, by arithmetic
blocks/       attention over packed documents, the chunked head
hf/           any transformers model, unmodified; writing a Hugging Face folder
"""
