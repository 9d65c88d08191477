"""Models that train on packed documents.

plugin.py     the declarations
provider.py   the protocols of the kind `prl.models`, and the choice of a provider by name
options.py    how a model is built
batch.py      what a model is given: a packed row on its device
family.py     what a family of models is; the spec of a decoder
family_provider.py  from a folder to a decoder by its family
conversion.py  names and shapes on disk against those in memory
sharing.py    whether ranks can share rows, by a model's numbers
shards.py     writing safetensors in one pass, with their checksum
weights.py    safetensors of a folder or of the hub, one tensor at a time
blocks/       what decoders are made of, and packed attention, and the chunked head
llama/        Llama, SmolLM, Mistral, Qwen2
qwen3/        Qwen3
hf/           any transformers model, unmodified; writing a Hugging Face folder
"""
