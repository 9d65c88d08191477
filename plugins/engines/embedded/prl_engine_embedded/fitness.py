"""Whether the fixed scheduler computes what the model computes. Tried out at the start, on a few random tokens."""

from __future__ import annotations

import logging

import torch

from prl.errors import UsageError
from prl_engine_embedded.fixed import tier
from prl_engine_embedded.model import LoadedModel
from prl_engine_embedded.slots import ATTENTION, SlotCache, Unsupported

log = logging.getLogger(__name__)

LARGE = 50_000_000
"""Parameters from which trying out many rows takes longer than it would save; such a run is not for one CPU thread."""
REMEDY = 'set engine.batching = "continuous", which uses the model\'s own attention'


def require_plain_attention(model: LoadedModel) -> None:
    """Compare prefill and decode through slots with the model's own forward pass.

    Raises:
        UsageError: the model needs more than plain full attention, or comes out different.
    """
    module = model.module
    name = type(module).__name__
    config = module.config.get_text_config()
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or []} - {"full_attention"}
    if kinds:
        found = ", ".join(sorted(kinds))
        raise UsageError(f"{name} has layers of {found}, the fixed scheduler serves full attention only: {REMEDY}")
    rope = getattr(config, "rope_parameters", None) or {}
    if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
        raise UsageError(
            f"{name} scales its positions with the longest sequence of a batch ({rope['rope_type']}): {REMEDY}"
        )
    if module.get_output_embeddings() is None:
        raise UsageError(f"{name} does not say which module is its head: {REMEDY}")
    try:
        ours = _through_slots(model)
    except (Unsupported, TypeError, AttributeError, RuntimeError) as error:
        raise UsageError(f"{name} cannot be served by the fixed scheduler ({error}): {REMEDY}") from error
    module.set_attn_implementation("sdpa")
    try:
        theirs = _plain(model)
    finally:
        module.set_attn_implementation(ATTENTION)
    differences = (ours - theirs).abs()
    # Rounding in bfloat16 moves single log-probabilities of a pretrained model by 0.5, their mean by 0.06.
    exact = next(module.parameters()).dtype == torch.float32
    difference, limit = (differences.max().item(), 1e-3) if exact else (differences.mean().item(), 0.15)
    if not difference <= limit:
        raise UsageError(
            f"{name}: log-probabilities of the fixed scheduler differ from the model's own by {difference:.3g}"
            f"{'' if exact else ' in the mean'}, allowed is {limit:g}: {REMEDY}"
        )


def _tokens(model: LoadedModel, rows: int, length: int) -> torch.Tensor:
    vocabulary = model.module.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (rows, length), generator=generator).to(model.device)


def _lengths(model: LoadedModel) -> tuple[int, int]:
    """Of the prompt and of the whole test sequence."""
    whole = max(2, min(12, model.max_tokens))
    return max(1, whole - 3), whole


@torch.inference_mode()
def _through_slots(model: LoadedModel, window: int = 32, rows: int = 8, offset: int = 0) -> torch.Tensor:
    """Log-probabilities after the prompt and after each further token, [rows, steps, V]. `offset` changes the tokens of
    the second half of the rows."""
    prompt, whole = _lengths(model)
    ids = _tokens(model, 8, whole).repeat(-(-rows // 8), 1)[:rows]
    ids[rows // 2 :] = (ids[rows // 2 :] + offset) % model.module.get_input_embeddings().weight.shape[0]
    cache = SlotCache(rows, window)
    slots = torch.arange(rows, device=model.device)
    cache.prefill(slots)
    steps = torch.arange(prompt, device=model.device)[None].expand(rows, prompt)
    output = model.module(input_ids=ids[:, :prompt], position_ids=steps, past_key_values=cache, use_cache=True)
    found = [output.logits[:, -1]]
    for position in range(prompt, whole):
        at = torch.full((rows,), position, device=model.device)
        visible = torch.arange(window, device=model.device) <= position
        mask = torch.where(visible, 0.0, -torch.inf).expand(rows, 1, 1, window)
        cache.decode(at)
        output = model.module(
            input_ids=ids[:, position : position + 1],
            position_ids=at[:, None],
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        )
        found.append(output.logits[:, -1])
    return torch.log_softmax(torch.stack(found, 1).float(), -1)


@torch.inference_mode()
def _plain(model: LoadedModel) -> torch.Tensor:
    prompt, whole = _lengths(model)
    logits = model.module(input_ids=_tokens(model, 8, whole), use_cache=False).logits[:, prompt - 1 : whole]
    return torch.log_softmax(logits.float(), -1)


def warn_of_companions(model: LoadedModel) -> bool:
    """Say so if a row's results depend on the rows beside it, as they do where rows are sorted by expert."""
    alone = _through_slots(model)
    beside = _through_slots(model, offset=1)
    if torch.equal(alone[:4], beside[:4]):
        return True
    log.warning(
        "%s computes a row differently beside other rows: this run will not repeat bit for bit",
        type(model.module).__name__,
    )
    return False


def rows_are_invisible(model: LoadedModel, most: int) -> bool:
    """Whether passes of fewer rows than `most` give the same bits, so that a repeatable run may use them."""
    if sum(parameter.numel() for parameter in model.module.parameters()) > LARGE:
        return False
    sizes = {tier(count, most) for count in range(1, most + 1)}
    whole = _through_slots(model, rows=most)[:8]
    same = all(torch.equal(whole, _through_slots(model, rows=size)[:8]) for size in sizes)
    if not same:
        log.warning("results depend on the number of rows here: every pass is of %d rows, which is slower", most)
    return same


def window_is_invisible(model: LoadedModel) -> bool:
    """Whether results are the same bits for every window. If not, a repeatable run must keep one window throughout."""
    first = _through_slots(model, 32)
    same = all(torch.equal(first, _through_slots(model, window)) for window in (64, 128, 256))
    if not same:
        log.warning("results depend on the size of the cache here: it is kept at its largest, which is slower")
    return same
