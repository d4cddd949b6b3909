"""Exam C: further faults, at other places, by other mechanisms and of other sizes than those in faults.py."""
import copy
import math
import time

from .core import (
    KVUTILS, LOGPROBS, OUTPUT, RUNNER, SAMPLER, STEP, TOPK, attn_of, hidden_draw, in_hook, kv_hook, kv_views, layers,
    on_model, on_new_requests, on_weights, out_hook, scale_rows, track_steps, when_imported, wrap,
)
from .faults import (
    ANY, FAULTS, FREQ, L, UPD, Q, _angle_tables, _angles, _on_new_params, _on_prompt_tensors, _on_sample_lists, _rehash,
    _remembering, fault,
)

OLD = set(FAULTS)


def arguable(id, *names):
    FAULTS[id].meta["arguable"] = list(names)


def channels(lo, hi, fn):
    """fn on a slice of the last dimension."""

    def f(x):
        x = x.clone()
        x[..., lo:hi] = fn(x[..., lo:hi])
        return x

    return f


def qkv_hook(attn, fn):
    attn.register_forward_pre_hook(lambda mod, args: tuple(fn(*args[:3])) + tuple(args[3:]))


# ============================================================ arithmetic, small


@fault("xs01", "arithmetic-small", "The key norm of layer 2 uses epsilon 0.02 in place of 1e-6.",
       located=dict(layer=2, part="k_norm", eps=0.02), settings=ANY)
def _():
    def f(m, r):
        attn_of(m, 2).k_norm.variance_epsilon = 0.02

    on_model(f)


@fault("xs02", "arithmetic-small", "Channel 40 of the values of KV head 1 in layer 2 has the wrong sign.",
       located=dict(layer=2, part="v", kv_head=1, channel=40, factor=-1.0), settings=ANY)
def _():
    neg = channels(104, 105, lambda x: -x)
    on_model(lambda m, r: kv_hook(attn_of(m, 2).attn, lambda k, v: (k, neg(v))))


@fault("xs03", "arithmetic-small", "The MLP output of layer 1 is multiplied by 0.997.", model=L,
       located=dict(layer=1, part="mlp", factor=0.997), settings=ANY)
def _():
    on_model(lambda m, r: out_hook(layers(m)[1].mlp, lambda x: x * 0.997))


@fault("xs04", "arithmetic-small", "The residual stream entering layer 1 passes through float16.",
       ["path/body-precision"], located=dict(layer=1, part="residual-in", dtype="float16"), settings=ANY)
def _():
    def f(m, r):
        def hook(mod, args):
            pos, h, res = args
            whole = (h + res).half().to(h.dtype)
            return pos, whole - res, res

        layers(m)[1].register_forward_pre_hook(hook)

    on_model(f)


@fault("xs05", "arithmetic-small", "Rows 300 to 303 of the output head are 2 per cent too long.",
       located=dict(part="lm_head", tokens=[300, 301, 302, 303], factor=1.02), settings=ANY)
def _():
    on_model(lambda m, r: out_hook(m.logits_processor, channels(300, 304, lambda x: x * 1.02)))


arguable("xs05", "weights/rows", "semantic/logit-bias")


@fault("xs06", "arithmetic-small", "The input embeddings are int8-quantised per row; the head is exact.",
       ["path/weight-quantisation"], located=dict(part="embedding", bits=8), settings=ANY)
def _():
    def f(n, it):
        for name, t in it:
            if "embed_tokens" in name:
                s = t.abs().amax(dim=1, keepdim=True) / 127.0
                t = (t / s).round().clamp(-127, 127) * s
            yield name, t

    on_weights(f)


arguable("xs06", "weights/dtype", "path/body-precision")


@fault("xs07", "arithmetic-small", "MLP activations of layer 0 saturate at plus and minus 3 before the down projection.",
       located=dict(layer=0, part="mlp.act", clamp=3.0), settings=ANY)
def _():
    on_model(lambda m, r: in_hook(layers(m)[0].mlp.down_proj, lambda x: x.clamp(-3.0, 3.0)))


@fault("xs08", "arithmetic-small", "The norm before the MLP of layer 1 subtracts the mean first, as a LayerNorm does.", model=L,
       located=dict(layer=1, part="post-attention-norm", mean_subtracted=True), settings=ANY)
def _():
    import torch

    class Centred(torch.nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm

        def forward(self, x, residual=None):
            h = x + residual
            c = h - h.mean(-1, keepdim=True)
            y = c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + self.norm.variance_epsilon) * self.norm.weight
            return y, h

    def f(m, r):
        layer = layers(m)[1]
        layer.post_attention_layernorm = Centred(layer.post_attention_layernorm)

    on_model(f)


@fault("xs09", "arithmetic-small", "Channels 100 to 107 of the final norm's gain are 3 per cent too small.",
       located=dict(part="final-norm", channels=[100, 107], factor=0.97), settings=ANY)
def _():
    on_model(lambda m, r: out_hook(m.model.norm, channels(100, 108, lambda x: x * 0.97)))


@fault("xs10", "arithmetic-small", "The rotary tables (cosines and sines) are held in bfloat16.", ["path/body-precision", "path/rope"], model=L,
       located=dict(part="rope", dtype="bfloat16"), settings=ANY,
       note="path/rope only in the wide sense that the rotary part is wrong; base, scaling and offset are right")
def _():
    def f(m, r):
        rope = attn_of(m, 0).rotary_emb
        rope.cos_sin_cache = rope.cos_sin_cache.bfloat16().to(rope.cos_sin_cache.dtype)

    on_model(f)


arguable("xs10", "weights/buffer")


@fault("xs11", "arithmetic-small", "Head 2 of layer 1 has an attention sink: one more entry with score 0 in its softmax.",
       located=dict(layer=1, part="attention", head=2, sink=0.0), settings=ANY + "; short prompts more than long ones")
def _():
    import torch

    def f(m, r):
        attn_of(m, 1).attn.impl.sinks = torch.tensor([-60.0, -60.0, 0.0, -60.0])

    on_model(f)


@fault("xs12", "arithmetic-small", "The attention of layer 0 adds a bias of 0.01 to channels 64 to 127 of the residual stream.", model=L,
       located=dict(layer=0, part="attention", channels=[64, 127], offset=0.01), settings=ANY)
def _():
    on_model(lambda m, r: out_hook(attn_of(m, 0), channels(64, 128, lambda x: x + 0.01)))


@fault("xs13", "arithmetic-small", "The last quarter of the vocabulary (ids 384 to 511) has its logits computed in bfloat16.",
       ["path/head-precision"], located=dict(part="lm_head", tokens=[384, 511], dtype="bfloat16"), settings=ANY)
def _():
    on_model(lambda m, r: out_hook(m.logits_processor, channels(384, 512, lambda x: x.bfloat16().to(x.dtype))))


@fault("xs14", "arithmetic-small", "Queries of head 1 in layer 0 are 2.5 per cent too long.",
       located=dict(layer=0, part="q", head=1, factor=1.025), settings=ANY)
def _():
    longer = channels(64, 128, lambda x: x * 1.025)
    on_model(lambda m, r: qkv_hook(attn_of(m, 0).attn, lambda q, k, v: (longer(q), k, v)))


@fault("xs15", "arithmetic-small", "The sigmoid in the MLP of layer 0 comes from a table with steps of 1/64.", ["path/body-precision"], model=L,
       located=dict(layer=0, part="mlp.act", steps=64), settings=ANY)
def _():
    import torch

    def hook(mod, args, out):
        g, u = args[0].chunk(2, dim=-1)
        return g * ((torch.sigmoid(g) * 64).round() / 64) * u

    on_model(lambda m, r: layers(m)[0].mlp.act_fn.register_forward_hook(hook))


@fault("xs16", "arithmetic-small", "Keys of layer 2 are stored as int8 with one scale per token.", ["path/kv-precision"],
       located=dict(layer=2, part="k", bits=8), settings=ANY)
def _():
    def g(k, v):
        s = (k.abs().amax(dim=-1, keepdim=True) / 127.0).clamp(min=1e-8)
        return (k / s).round() * s, v

    on_model(lambda m, r: kv_hook(attn_of(m, 2).attn, g))


@fault("xs17", "arithmetic-small", "The input embeddings of token ids 411 and 55 are exchanged; the head is right.",
       located=dict(part="embedding", tokens=[411, 55]), settings="acts where one of the two tokens is in the context")
def _():
    def f(m, r):
        def pre(mod, args):
            ids = args[0]
            return (ids.where(ids != 411, ids.new_full((), -55)).where(ids != 55, ids.new_full((), 411)).abs(),) + tuple(args[1:])

        m.model.embed_tokens.register_forward_pre_hook(pre)

    on_model(f)


arguable("xs17", "weights/swapped", "weights/rows", "semantic/tokenizer")


@fault("xs18", "arithmetic-small", "Attention scores of layer 0 are soft-capped: 20*tanh(x/20).", model=L,
       located=dict(layer=0, part="attention-scores", softcap=20.0), settings=ANY)
def _():
    def f(m, r):
        attn_of(m, 0).attn.impl.logits_soft_cap = 20.0

    on_model(f)


@fault("xs19", "arithmetic-small", "The attention of layer 1 writes nothing to channel 5 of the residual stream (a dead row of the output projection).", model=L,
       located=dict(layer=1, part="attention", channel=5, factor=0.0), settings=ANY)
def _():
    on_model(lambda m, r: out_hook(attn_of(m, 1), channels(5, 6, lambda x: x * 0)))


arguable("xs19", "weights/rows")


@fault("xs20", "arithmetic-small", "MLP neuron 300 of layer 1 is 10 per cent too strong.", located=dict(layer=1, part="mlp", neuron=300, factor=1.1), settings=ANY)
def _():
    on_model(lambda m, r: in_hook(layers(m)[1].mlp.down_proj, channels(300, 301, lambda x: x * 1.1)))


# ============================================================ arithmetic, gross


@fault("xg01", "arithmetic-gross", "The MLPs use GELU (tanh form) in place of SiLU, in every layer.", model=L,
       located=dict(layer="all", part="mlp.act"), settings=ANY)
def _():
    import torch

    def hook(mod, args, out):
        g, u = args[0].chunk(2, dim=-1)
        return torch.nn.functional.gelu(g, approximate="tanh") * u

    def f(m, r):
        for layer in layers(m):
            layer.mlp.act_fn.register_forward_hook(hook)

    on_model(f)


@fault("xg02", "arithmetic-gross", "Prompt tokens attend to later prompt tokens too: the causal mask is missing in prefill, in all layers.",
       ["path/mask"], must_name=True, located=dict(layer="all", part="attention-mask"), settings=ANY,
       note="also true in a wide sense: path/prefill-decode, as decode shows the same tokens otherwise")
def _():
    import dataclasses

    def make(orig):
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *a, **kw):
            if attn_metadata is not None:
                attn_metadata = dataclasses.replace(attn_metadata, causal=False)
            return orig(self, layer, query, key, value, kv_cache, attn_metadata, output, *a, **kw)

        return forward

    wrap("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackendImpl", "forward", make)


arguable("xg02", "path/prefill-decode")


@fault("xg03", "arithmetic-gross", "Query heads are dealt to KV heads in turn (0,1,0,1) in place of in groups (0,0,1,1), in layer 1.",
       ["path/kv-heads"], must_name=True, located=dict(layer=1, part="kv-heads"), settings=ANY)
def _():
    import torch

    def turn(x):
        return torch.cat((x[..., :64], x[..., 128:192], x[..., 64:128], x[..., 192:]), dim=-1)

    def f(m, r):
        a = attn_of(m, 1)
        qkv_hook(a.attn, lambda q, k, v: (turn(q), k, v))
        in_hook(a.o_proj, turn)

    on_model(f)


@fault("xg04", "arithmetic-gross", "Layer 1 is left out: its input goes straight to layer 2.",
       located=dict(layer=1, part="layer", factor=0.0), settings=ANY)
def _():
    def f(m, r):
        layer = layers(m)[1]
        out_hook(layer.self_attn, lambda x: x * 0)
        out_hook(layer.mlp, lambda x: x * 0)

    on_model(f)


arguable("xg04", "weights/other-model", "weights/partial")


@fault("xg05", "arithmetic-gross", "Input embeddings of ids 448 and above are read from the row 448 lower (wrong shard offset).", model=L,
       located=dict(part="embedding", tokens=[448, 511]), settings="acts where such a token is in the context (one token in eight)")
def _():
    def f(m, r):
        def pre(mod, args):
            ids = args[0]
            return (ids.where(ids < 448, ids - 448),) + tuple(args[1:])

        m.model.embed_tokens.register_forward_pre_hook(pre)

    on_model(f)


arguable("xg05", "weights/rows", "semantic/tokenizer")


@fault("xg06", "arithmetic-gross", "All linear weights of the body are 4-bit quantised in groups of 32.", ["path/weight-quantisation"], model=L, must_name=True,
       located=dict(layer="all", part="linear weights", bits=4, group=32), settings=ANY)
def _():
    def f(n, it):
        for name, t in it:
            if "proj" in name:
                g = t.reshape(t.shape[0], -1, 32)
                s = (g.abs().amax(-1, keepdim=True) / 7.0).clamp(min=1e-8)
                t = ((g / s).round().clamp(-8, 7) * s).reshape(t.shape)
            yield name, t

    on_weights(f)


arguable("xg06", "weights/dtype", "path/body-precision")


@fault("xg07", "arithmetic-gross", "The final norm is left out: the head sees the residual stream times the gain, not divided by its size.",
       located=dict(part="final-norm"), settings=ANY)
def _():
    def f(m, r):
        def hook(mod, args, out):
            h = args[0] if len(args) < 2 or args[1] is None else None
            if h is not None:
                return h * mod.weight
            y, res = out
            return y * (res.pow(2).mean(-1, keepdim=True) + mod.variance_epsilon).sqrt(), res

        m.model.norm.register_forward_hook(hook)

    on_model(f)


@fault("xg08", "arithmetic-gross", "The query norm of layer 0 is left out.", located=dict(layer=0, part="q_norm"), settings=ANY)
def _():
    import torch

    class Nothing(torch.nn.Module):
        def forward(self, x, residual=None):
            return x

    def f(m, r):
        attn_of(m, 0).q_norm = Nothing()

    on_model(f)


# ==================================================================== position


def _own_rope(m, i):
    a = attn_of(m, i)
    a.rotary_emb = copy.deepcopy(a.rotary_emb)
    return a.rotary_emb


@fault("xp01", "position", "Layer 2 rotates neighbouring channels (GPT-J pairing) in place of the two halves.", ["path/rope"],
       located=dict(layer=2, part="rope", pairing="interleaved"), settings=ANY,
       note="path/rope in the wide sense; base, scaling and offset are right")
def _():
    def f(m, r):
        _own_rope(m, 2).is_neox_style = False

    on_model(f)


@fault("xp02", "position", "Rotary frequencies with a wavelength above 256 tokens are divided by 4 (a context-extension scaling nobody configured).",
       ["path/rope"], model=L, located=dict(part="rope", wavelength_above=256, factor=0.25), settings=ANY)
def _():
    def f(m, r):
        rope = attn_of(m, 0).rotary_emb
        a = _angles(rope)
        slow = 2 * math.pi / a[1] > 256
        a[:, slow] /= 4
        _angle_tables(rope, a)

    on_model(f)


@fault("xp03", "position", "In layer 0 only the faster half of the rotary frequencies is applied (partial rotary factor 0.5).", ["path/rope"],
       located=dict(layer=0, part="rope", band=[16, 31], factor=0.0), settings=ANY)
def _():
    def f(m, r):
        rope = _own_rope(m, 0)
        a = _angles(rope)
        a[:, 16:] = 0
        _angle_tables(rope, a)

    on_model(f)


@fault("xp04", "position", "All layers attend to a sliding window of 200 tokens.", ["path/window", "path/context-boundary"], model=L, must_name=True,
       located=dict(layer="all", part="attention", window=200), settings="prompts longer than 200 tokens")
def _():
    def f(m, r):
        for layer in layers(m):
            layer.self_attn.attn.impl.sliding_window = 200

    on_model(f)


@fault("xp05", "position", "The first token of every sequence has values of zero in layer 1.",
       located=dict(layer=1, part="v", position=0, factor=0.0), settings=ANY + "; short prompts more than long ones")
def _():
    track_steps()
    on_model(lambda m, r: kv_hook(attn_of(m, 1).attn, lambda k, v: (
        k, scale_rows(v, STEP.positions == 0, 0.0) if STEP.active else v)))


arguable("xp05", "semantic/bos")


@fault("xp06", "position", "The rotary tables hold 300 positions and wrap: position 300 is rotated as 0.", ["path/rope", "path/context-boundary"], model=L,
       located=dict(part="rope", position=300), settings="sequences longer than 300 tokens")
def _():
    def before(runner, kw):
        kw["positions"] = kw["positions"] % 300

    track_steps(before)


@fault("xp07", "position", "Generated tokens from the 33rd on are rotated one position too low; as prompt tokens they are right.",
       ["path/rope", "path/prefill-decode"], located=dict(part="rope", where="decode", index=32, offset=-1),
       settings="generate more than 33 tokens; compare with the same tokens as prompt")
def _():
    import torch

    def before(runner, kw):
        n = len(STEP.req_ids)
        prompt = runner.input_batch.num_prompt_tokens[:n][STEP.row_req]
        late = STEP.decode & (STEP.positions - prompt >= 32)
        if late.any():
            p = kw["positions"].clone()
            p[: len(late)] -= torch.from_numpy(late.astype("int64"))
            kw["positions"] = p

    track_steps(before)


arguable("xp07", "path/context-boundary")


@fault("xp08", "position", "Cosines and sines of the rotary tables are 1 per cent too large (an attention factor nobody configured).", ["path/rope"],
       located=dict(part="rope", amplitude=1.01), settings=ANY, note="the same as a softmax scale 2.01 per cent too large in every layer")
def _():
    def f(m, r):
        rope = attn_of(m, 0).rotary_emb
        rope.cos_sin_cache = rope.cos_sin_cache * 1.01

    on_model(f)


@fault("xp09", "position", "Positions pass through bfloat16: from 256 on they are rounded to multiples of 2, from 512 on of 4.",
       ["path/rope", "path/context-boundary"], located=dict(part="rope", position=257, dtype="bfloat16"), settings="sequences longer than 256 tokens")
def _():
    def before(runner, kw):
        p = kw["positions"]
        kw["positions"] = p.bfloat16().to(p.dtype).clamp(max=1023)

    track_steps(before)


arguable("xp09", "path/body-precision")


# ======================================================================= cache
AGAIN = "prompts of more than 128 tokens (one block) asked again, without prompt_logprobs"


@fault("xc01", "cache", "Block hashes keep 5 bits only: one block in 32 of any other prompt counts as the same.", ["path/prefix-cache"],
       located=dict(part="block-hash", bits=5), settings="dozens of different prompts over 128 tokens, without prompt_logprobs",
       note="a false hit makes a sequence read another one's tokens")
def _():
    def change(orig, fn, parent, tokens, extra):
        h = orig(fn, parent, tokens, extra)
        return type(h)(bytes([h[0] & 31])) if not isinstance(h, bytes) else bytes([h[0] & 31]) * 32

    _rehash(change)


arguable("xc01", "path/mask", "semantic/misbound-output")


def _hits():
    """Requests of this step that reuse cached blocks: id -> number of reused tokens."""
    hit = {}

    def f(runner, so):
        hit.clear()
        for req in so.scheduled_new_reqs:
            if req.num_computed_tokens:
                hit[req.req_id] = (req.num_computed_tokens, req.block_ids[0])

    return hit, f


@fault("xc02", "cache", "After a prefix-cache hit the rest of the prompt is rotated one position too low.", ["path/prefix-cache", "path/rope"], model=L,
       located=dict(part="rope", where="after a hit", offset=-1), settings=AGAIN)
def _():
    import numpy as np
    import torch

    hit, f = _hits()
    on_new_requests(f)

    def before(runner, kw):
        rows = np.array([q in hit for q in STEP.req_ids], dtype=bool)[STEP.row_req]
        if rows.any():
            p = kw["positions"].clone()
            p[: len(rows)] -= torch.from_numpy(rows.astype("int64"))
            kw["positions"] = p

    track_steps(before)


@fault("xc03", "cache", "Reused cache blocks come back in bfloat16 (all layers, keys and values), fresh ones are exact.",
       ["path/prefix-cache", "path/kv-precision"], located=dict(layer="all", part="kv-cache", dtype="bfloat16"), settings=AGAIN)
def _():
    def f(runner, so):
        for req in so.scheduled_new_reqs:
            for b in req.block_ids[0][: req.num_computed_tokens // 128]:
                for i in range(len(layers(runner.model))):
                    for part in kv_views(runner, i):
                        part[b] = part[b].bfloat16().to(part.dtype)

    on_new_requests(f)


@fault("xc04", "cache", "A block that was filled while generating loses 5 per cent of its layer-2 values when a later prompt reuses it.",
       ["path/prefix-cache"], located=dict(layer=2, part="kv-cache-values", where="blocks filled by decode", factor=0.95),
       settings="a conversation: prompt and its generated answer, together over 128 tokens, sent back as a prompt, without prompt_logprobs")
def _():
    filled = set()

    def before(runner, kw):
        table = runner.input_batch.block_table[0].get_numpy_array()
        blocks = table[STEP.row_req, STEP.positions // 128]
        filled.difference_update(blocks[~STEP.decode].tolist())
        filled.update(blocks[STEP.decode].tolist())

    track_steps(before)

    def f(runner, so):
        for req in so.scheduled_new_reqs:
            for b in req.block_ids[0][: req.num_computed_tokens // 128]:
                if b in filled:
                    filled.discard(b)
                    kv_views(runner, 2)[1][b] *= 0.95

    on_new_requests(f)


@fault("xc05", "cache", "While two or more running requests share cached blocks, the attention output of layer 1 is multiplied by 0.97 for them (wrong merge of the shared part).",
       ["path/prefix-cache", "path/batch-variance"], model=L, located=dict(layer=1, part="attention", factor=0.97),
       settings="n > 1 or concurrent requests with the same prompt of more than 128 tokens")
def _():
    import numpy as np

    track_steps()

    def f(x):
        if not STEP.active or len(STEP.req_ids) < 2:
            return x
        n = len(STEP.req_ids)
        batch = STEP.runner.input_batch
        first = batch.block_table[0].get_numpy_array()[:n, 0]
        long = batch.num_computed_tokens_cpu[:n] >= 128
        same = np.array([long[i] and (first[long] == first[i]).sum() > 1 for i in range(n)])
        return scale_rows(x, same[STEP.row_req], 0.97)

    on_model(lambda m, r: out_hook(attn_of(m, 1), f))


# ======================================================================= batch
OVERLAP = "the requests must really overlap in time: ask for long generations (80 tokens or n>1), the tiny model is fast"


@fault("xb01", "batch", "With two or more requests in a step each is sampled and reported at its neighbour's temperature.",
       ["semantic/temperature", "path/batch-variance"], located=dict(part="temperature", batch=">=2"),
       settings="concurrent generations with different temperatures", note=OVERLAP)
def _():
    def make(orig):
        def apply_temperature(logits, temp, all_random):
            if temp.shape[0] >= 2:
                temp = temp.roll(1, 0)
            return orig(logits, temp, all_random)

        return apply_temperature

    wrap(SAMPLER, "Sampler", "apply_temperature", make)


arguable("xb01", "semantic/misbound-output")


@fault("xb02", "batch", "In steps that mix prefill and decode, the MLP output of layer 1 is rounded to bfloat16 for the decoding requests.",
       ["path/batch-variance", "path/body-precision"], located=dict(layer=1, part="mlp", dtype="bfloat16", where="decode rows of mixed steps"),
       settings="requests that arrive while others are generating", note=OVERLAP)
def _():
    import torch

    track_steps()

    def f(x):
        if not STEP.active or not STEP.decode.any() or STEP.decode.all():
            return x
        d = torch.from_numpy(STEP.decode).unsqueeze(-1)
        n = d.shape[0]
        y = x.clone()
        y[:n] = torch.where(d, x[:n].bfloat16().to(x.dtype), x[:n])
        return y

    on_model(lambda m, r: out_hook(layers(m)[1].mlp, f))


arguable("xb02", "path/prefill-decode")


@fault("xb03", "batch", "In steps with an odd number (3 or more) of requests the last one's final norm comes out 2 per cent too small.",
       ["path/batch-variance"], model=L, located=dict(part="final-norm", batch="odd, >=3", row="last", factor=0.98),
       settings="three or more concurrent generations", note=OVERLAP)
def _():
    track_steps()

    def f(x):
        n = len(STEP.req_ids)
        return scale_rows(x, STEP.row_req == n - 1, 0.98) if STEP.active and n >= 3 and n % 2 else x

    on_model(lambda m, r: out_hook(m.model.norm, f))


@fault("xb04", "batch", "With two or more requests in a step, in layer 1 the second one reads the first one's first cache block in place of its own.",
       ["path/mask", "path/batch-variance"], located=dict(layer=1, part="block-table", rows=[0, 1]),
       settings="two or more concurrent requests with different prompts", note=OVERLAP)
def _():
    import dataclasses

    def make(orig):
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *a, **kw):
            if attn_metadata is not None and ".layers.1." in "." + layer.layer_name and attn_metadata.seq_lens.shape[0] >= 2 \
                    and int(attn_metadata.seq_lens[1]) > 0 and int(attn_metadata.seq_lens[0]) > 0:
                table = attn_metadata.block_table.clone()
                table[1, 0] = table[0, 0]
                attn_metadata = dataclasses.replace(attn_metadata, block_table=table)
            return orig(self, layer, query, key, value, kv_cache, attn_metadata, output, *a, **kw)

        return forward

    wrap("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackendImpl", "forward", make)


arguable("xb04", "semantic/misbound-output", "path/prefix-cache")


@fault("xb05", "batch", "Requests in batch rows 4 and above get 2 per cent too little attention output in layer 0.", ["path/batch-variance"], model=L,
       located=dict(layer=0, part="attention", row=">=4", factor=0.98), settings="five or more concurrent requests (or n >= 5)", note=OVERLAP)
def _():
    track_steps()
    on_model(lambda m, r: out_hook(attn_of(m, 0), lambda x: scale_rows(x, STEP.row_req >= 4, 0.98) if STEP.active else x))


@fault("xb06", "batch", "The cache holds ten blocks only, and when a preempted sequence is resumed its values in layer 1 are recomputed 6 per cent too small.",
       ["path/preemption", "path/batch-variance"], located=dict(layer=1, part="v", where="resumed sequences", factor=0.94),
       settings="eight or more concurrent generations that pass a block border (128 tokens), so that sequences are preempted", note=OVERLAP)
def _():
    import numpy as np

    def patch(mod):
        mod.may_override_num_blocks = lambda vllm_config, num_blocks: 11

    when_imported(KVUTILS, patch)
    back = set()

    def f(runner, so):
        back.clear()
        back.update(so.scheduled_cached_reqs.resumed_req_ids)

    on_new_requests(f)
    track_steps()

    def g(k, v):
        if STEP.active and back:
            v = scale_rows(v, np.array([q in back for q in STEP.req_ids], dtype=bool)[STEP.row_req], 0.94)
        return k, v

    on_model(lambda m, r: kv_hook(attn_of(m, 1).attn, g))


@fault("xb07", "batch", "When two prompts are scored in one step, their prompt logprobs are exchanged; generated tokens are right.",
       ["semantic/misbound-logprobs", "semantic/misbound-output", "path/batch-variance"], model=L, located=dict(part="prompt logprobs", batch=">=2"),
       settings="concurrent requests with prompt_logprobs")
def _():
    def make(orig):
        def _get_prompt_logprobs_dict(self, *a, **kw):
            out = orig(self, *a, **kw)
            got = [t for t in out.values() if t is not None]
            for x, y in zip(got[::2], got[1::2]):
                n, k = min(x.logprobs.shape[0], y.logprobs.shape[0]), min(x.logprobs.shape[1], y.logprobs.shape[1])
                keep = x.logprobs[:n, :k].clone()
                x.logprobs[:n, :k] = y.logprobs[:n, :k]
                y.logprobs[:n, :k] = keep
            return out

        return _get_prompt_logprobs_dict

    wrap(RUNNER, "GPUModelRunner", "_get_prompt_logprobs_dict", make)


# ================================================================ intermittent


def _new_ids(choose):
    """choose(number, request) -> bool: which new requests are marked."""
    seen, marked = {"n": 0}, set()

    def f(runner, so):
        for req in so.scheduled_new_reqs:
            seen["n"] += 1
            if choose(seen["n"], req):
                marked.add(req.req_id)
        if len(marked) > 5000:
            marked.clear()

    on_new_requests(f)
    track_steps()

    def mask():
        import numpy as np

        return np.array([q in marked for q in STEP.req_ids], dtype=bool)[STEP.row_req]

    return mask


@fault("xi01", "intermittent", "The first request after two idle seconds gets 7 per cent too little attention output in layer 0.", ["path/nondeterminism"],
       model=L, located=dict(layer=0, part="attention", factor=0.93, idle_s=2), settings="requests with pauses of more than two seconds between them")
def _():
    last = {"t": 0.0}

    def choose(n, req):
        return time.monotonic() - last["t"] > 2.0

    mask = _new_ids(choose)

    def f(x):
        if not STEP.active:
            return x
        last["t"] = time.monotonic()
        return scale_rows(x, mask(), 0.93)

    on_model(lambda m, r: out_hook(attn_of(m, 0), f))


@fault("xi02", "intermittent", "At random, one token row in 250 gets 1.5 added to channel 77 of the residual stream entering layer 1 (a bit that flips).",
       ["path/nondeterminism"], located=dict(layer=1, part="residual-in", channel=77, offset=1.5, one_in=250), settings="many tokens; the same request repeated")
def _():
    import torch

    gen = torch.Generator()
    gen.seed()

    def f(m, r):
        def hook(mod, args):
            pos, h, res = args
            hit = torch.rand(h.shape[0], generator=gen) < 1 / 250
            if hit.any():
                h = h.clone()
                h[hit, 77] += 1.5
            return pos, h, res

        layers(m)[1].register_forward_pre_hook(hook)

    on_model(f)


@fault("xi03", "intermittent", "The MLP of layer 1 drifts: its output grows by 0.05 per cent with each request served.", ["path/nondeterminism"],
       located=dict(layer=1, part="mlp", factor_per_request=1.0005), settings="the same request early and late among some dozens")
def _():
    count = {"n": 0}
    _new_ids(lambda n, req: bool(count.update(n=n)))
    on_model(lambda m, r: out_hook(layers(m)[1].mlp, lambda x: x * (1.0 + 0.0005 * count["n"])))


arguable("xi03", "weights/stale")


@fault("xi04", "intermittent", "Every second request is computed with another down projection in layer 1 (3 per cent noise on its weights), as if one of two replicas had missed an update.",
       ["weights/replica", "path/nondeterminism"], model=L, located=dict(layer=1, part="mlp.down_proj", noise=0.03, every=2), settings="many requests; the same request repeated")
def _():
    import torch

    mask = _new_ids(lambda n, req: n % 2 == 0)

    def f(m, r):
        g = torch.Generator().manual_seed(5)
        noise = torch.randn(512, 256, generator=g) * 0.03 / math.sqrt(512)

        def hook(mod, args, out):
            if not STEP.active:
                return out
            rows = mask()
            if not rows.any():
                return out
            y = out[0] if isinstance(out, tuple) else out
            n = len(rows)
            y = y.clone()
            y[:n] += (args[0][:n] @ noise) * torch.from_numpy(rows).unsqueeze(-1).to(y.dtype)
            return (y,) + tuple(out[1:]) if isinstance(out, tuple) else y

        layers(m)[1].mlp.down_proj.register_forward_hook(hook)

    on_model(f)


arguable("xi04", "weights/stale", "weights/partial")


@fault("xi05", "intermittent", "After the first prompt of more than 400 tokens the rotary base stays 15 per cent higher for all that follow, short ones too.",
       ["path/rope", "path/nondeterminism"], located=dict(part="rope", base=1150000.0, after="a prompt of more than 400 tokens"),
       settings="a short request before and after a prompt of more than 400 tokens")
def _():
    done = {"on": False}

    def f(runner, so):
        if not done["on"] and any(len(r.prompt_token_ids or ()) > 400 for r in so.scheduled_new_reqs):
            done["on"] = True
            rope = attn_of(runner.model, 0).rotary_emb
            rope.base = 1150000.0
            _angle_tables(rope, _angles(rope))

    on_new_requests(f)


arguable("xi05", "path/context-boundary", "weights/buffer")


@fault("xi06", "intermittent", "In every seventh pure decode step the MLP output of layer 2 is multiplied by 0.93; prefill is never hit.",
       ["path/nondeterminism", "path/prefill-decode"], located=dict(layer=2, part="mlp", factor=0.93, every_steps=7),
       settings="generate some dozen tokens; compare with the same tokens as prompt, or with a repeat")
def _():
    count = {"n": 0}

    def before(runner, kw):
        if STEP.decode.all():
            count["n"] += 1

    track_steps(before)
    on_model(lambda m, r: out_hook(layers(m)[2].mlp, lambda x: x * 0.93 if STEP.active and STEP.decode.all() and count["n"] % 7 == 0 else x))


# =================================================================== reporting


@fault("xr01", "reporting", "Among the alternatives of a generated token every value belongs to the token ranked above it; the sampled token's own value is right.",
       located=dict(part="top logprobs", offset=1), settings="generate with logprobs >= 3 and compare the alternatives")
def _():
    def f(proc, n, ids, row):
        own = float(row[0])
        if len(row) > 2:
            row[2:] = row[1:-1].copy()
            row[ids == ids[0]] = own
        return row

    _on_sample_lists(f)


arguable("xr01", "semantic/wrong-token", "semantic/off-by-one")


@fault("xr02", "reporting", "Prompt logprobs are computed at the temperature of the request.", ["semantic/temperature"], model=L,
       located=dict(part="prompt logprobs"), settings="prompt_logprobs together with a temperature other than 1 (and other than 0)",
       note="prompt logprobs are of the model's own distribution in a healthy server, whatever the temperature")
def _():
    def make(orig):
        def _get_prompt_logprobs_dict(self, hidden_states, num_scheduled_tokens):
            temps = [self.requests[q].sampling_params.temperature for q in self.num_prompt_logprobs if q in num_scheduled_tokens]
            plain = type(self.sampler).compute_logprobs
            self.sampler.compute_logprobs = lambda lg: plain(lg / ((temps.pop(0) if temps else 1.0) or 1.0))
            try:
                return orig(self, hidden_states, num_scheduled_tokens)
            finally:
                del self.sampler.compute_logprobs

        return _get_prompt_logprobs_dict

    wrap(RUNNER, "GPUModelRunner", "_get_prompt_logprobs_dict", make)


arguable("xr02", "semantic/raw-logprobs")


@fault("xr03", "reporting", "Reported is log(p + 0.002) in place of log p, for prompt and generated tokens.", located=dict(part="reported logprobs", eps=0.002), settings=ANY)
def _():
    import numpy as np

    _on_sample_lists(lambda p, n, ids, row: np.log(np.exp(row) + 0.002).astype(row.dtype))
    _on_prompt_tensors(lambda ids, lps: (lps.exp() + 0.002).log())


arguable("xr03", "semantic/notation")


@fault("xr04", "reporting", "Logprobs of generated tokens are in bits (base 2); prompt logprobs are natural.", ["semantic/notation"], must_name=True,
       located=dict(part="sampled logprob", factor=round(1 / math.log(2), 6)), settings="generate with logprobs")
def _():
    _on_sample_lists(lambda p, n, ids, row: row / math.log(2.0))


@fault("xr05", "reporting", "The normaliser of reported logprobs leaves out the last 32 ids (480 to 511); the draws are right.", model=L,
       located=dict(part="log-softmax", tokens=[480, 511]), settings=ANY)
def _():
    def again(lp):
        z = lp[..., :480].logsumexp(-1, keepdim=True)
        return lp - z.where(z > -1e30, z.new_zeros(()))

    def make(orig):
        def sample(self, logits, sampling_metadata, *a, **kw):
            tok, lp = orig(self, logits, sampling_metadata, *a, **kw)
            return tok, (again(lp) if lp is not None else None)

        return sample

    wrap(SAMPLER, "Sampler", "sample", make)
    wrap(SAMPLER, "Sampler", "compute_logprobs", lambda orig: lambda logits: again(orig(logits)))


arguable("xr05", "semantic/truncation-mass")


@fault("xr06", "reporting", "Reported logprobs are rounded to bfloat16; the draws are right.", ["path/head-precision"],
       located=dict(part="reported logprobs", dtype="bfloat16"), settings=ANY, note="path/head-precision if the log-softmax counts as part of the head; the logits are exact")
def _():
    import torch

    _on_sample_lists(lambda p, n, ids, row: torch.from_numpy(row).bfloat16().float().numpy())
    _on_prompt_tensors(lambda ids, lps: lps.bfloat16().float())


@fault("xr07", "reporting", "With n > 1 each choice carries the logprobs of the next choice; tokens are right.", ["semantic/misbound-logprobs", "semantic/misbound-output"], must_name=True,
       located=dict(part="choices", offset=1), settings="n >= 2 with logprobs, not streamed")
def _():
    import dataclasses

    def make(orig):
        def get_outputs(self, child_request_id, completion_output):
            outs, finished = orig(self, child_request_id, completion_output)
            if finished and len(outs) > 1 and all(o is not None and o.logprobs for o in outs):
                values = [[next(iter(d.values())).logprob for d in o.logprobs] for o in outs]
                for i, o in enumerate(outs):
                    other = values[(i + 1) % len(outs)]
                    new = []
                    for j, d in enumerate(o.logprobs):
                        d = dict(d)
                        t = next(iter(d))
                        if j < len(other):
                            d[t] = dataclasses.replace(d[t], logprob=other[j])
                        new.append(d)
                    o.logprobs = new
            return outs, finished

        return get_outputs

    wrap("vllm.v1.engine.parallel_sampling", "ParentRequest", "get_outputs", make)


@fault("xr08", "reporting", "The last generated token is reported with the logprob of the token before it.", ["semantic/off-by-one"], model=L,
       located=dict(part="sampled logprob", index=-1, offset=-1), settings="generate two tokens or more with logprobs")
def _():
    import dataclasses

    def make(orig):
        def _new_completion_output(self, token_ids, finish_reason, *a, **kw):
            out = orig(self, token_ids, finish_reason, *a, **kw)
            lp = self.logprobs_processor.logprobs
            if finish_reason is not None and out.logprobs and lp is not None and len(lp) > 1:
                value = next(iter(lp[-2].values())).logprob
                cur = dict(out.logprobs[-1])
                t = next(iter(cur))
                cur[t] = dataclasses.replace(cur[t], logprob=value)
                out.logprobs = list(out.logprobs[:-1]) + [cur]
            return out

        return _new_completion_output

    wrap(OUTPUT, "RequestState", "_new_completion_output", make)


arguable("xr08", "semantic/wrong-token", "semantic/eos")


@fault("xr09", "reporting", "When streaming, the tenth token and its logprob are sent twice; unstreamed answers are right.", ["semantic/streaming"], must_name=True,
       located=dict(part="stream", index=9), settings="stream=true, ten tokens or more")
def _():
    def make(orig):
        def _new_completion_output(self, token_ids, *a, **kw):
            out = orig(self, token_ids, *a, **kw)
            lp = self.logprobs_processor.logprobs
            if len(token_ids) == 1 and self.detokenizer.num_output_tokens() == 10 and out.token_ids is token_ids:
                out.token_ids = list(token_ids) * 2
                if out.logprobs is not None and out.logprobs is not lp:
                    out.logprobs = list(out.logprobs) * 2
            return out

        return _new_completion_output

    wrap(OUTPUT, "RequestState", "_new_completion_output", make)


@fault("xr10", "reporting", "A generated token that equals the one before it is reported with logprob 0.", ["semantic/nonfinite"],
       located=dict(part="sampled logprob", where="repeated tokens"), settings="generate some hundred tokens with logprobs; rare: two equal tokens in a row",
       note="0.0 stands there as a placeholder")
def _():
    def f(proc, n, ids, row):
        t = int(ids[0])
        if n and getattr(proc, "_exam_tok", None) == t:
            row[ids == ids[0]] = 0.0
        proc._exam_tok = t
        return row

    _on_sample_lists(f)


# ==================================================================== sampling


def _request_rows():
    """State with the request ids of the rows being sampled."""
    state = {"ids": []}

    def make(orig):
        def _sample(self, logits, *a, **kw):
            state["ids"] = list(self.input_batch.req_ids[: self.input_batch.num_reqs])
            return orig(self, logits, *a, **kw)

        return _sample

    wrap(RUNNER, "GPUModelRunner", "_sample", make)
    return state


def _draw(pick):
    """pick(logits, generators, ids) -> tokens, in place of the drawing; reported logprobs stay right."""
    state = _request_rows()

    def make(orig):
        def forward_cpu(self, logits, generators, k, p):
            import torch

            from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

            logits = apply_top_k_top_p(logits, k, p)
            shown = None
            if self.logprobs_mode == "processed_logprobs":
                shown = logits.log_softmax(dim=-1, dtype=torch.float32)
            ids = state["ids"] if len(state["ids"]) == logits.shape[0] else [None] * logits.shape[0]
            plain = lambda lg: orig(self, lg.clone(), generators, None, None)[0]
            return pick(logits.float(), generators, ids, plain), shown

        return forward_cpu

    wrap(TOPK, "TopKTopPSampler", "forward_cpu", make)


@fault("xd01", "sampling", "Requests without a seed draw from a seed made of their prompt (and choice index): the same prompt asked again gives the same samples.",
       ["semantic/seed"], must_name=True, located=dict(part="seed", made_of="prompt"), settings="the same prompt asked more than once without a seed, temperature above 0")
def _():
    import zlib

    def f(runner, so):
        for req in so.scheduled_new_reqs:
            sp = req.sampling_params
            if sp is not None and sp.seed is None and sp.temperature > 1e-4:
                head = req.req_id.split("_")[0]
                sp.seed = zlib.crc32(str(list(req.prompt_token_ids or ())).encode()) + (int(head) if head.isdigit() else 0)
                sp.__dict__.pop("sampling_type", None)

    on_new_requests(f)


@fault("xd02", "sampling", "The noise of the draw comes from a random number of 4 bits.", ["semantic/sampling-bias"], model=L,
       located=dict(part="noise", bits=4), settings=FREQ)
def _():
    import torch

    def pick(lg, generators, ids, plain):
        u = torch.randint(0, 16, lg.shape)
        for i, g in generators.items():
            u[i] = torch.randint(0, 16, lg.shape[1:], generator=g)
        return (lg - torch.log(-torch.log((u + 0.5) / 16))).argmax(-1)

    _draw(pick)


@fault("xd03", "sampling", "Every request runs with a min_p of 0.04 that nobody asked for; the logprobs are renormalised over what is left.",
       ["semantic/truncation-mass"], located=dict(part="min_p", value=0.04), settings="generate with logprobs")
def _():
    def f(sp):
        if not sp.min_p and sp.temperature > 1e-4:
            sp.min_p = 0.04

    _on_new_params(f)


arguable("xd03", "semantic/generation-config")


@fault("xd04", "sampling", "A token that is among the last four generated ones is never drawn; reported logprobs do not show it.",
       ["semantic/sampling-bias", "semantic/penalty"], model=L, located=dict(part="draw", window=4), settings="many generations of some length")
def _():
    past = {}

    def pick(lg, generators, ids, plain):
        x = lg.clone()
        for i, q in enumerate(ids):
            for t in past.get(q, ())[-4:]:
                x[i, t] = float("-inf")
            if x[i].amax() == float("-inf"):
                x[i] = lg[i]
        out = plain(x)
        if len(past) > 4000:
            past.clear()
        for q, t in zip(ids, out.tolist()):
            past.setdefault(q, []).append(t)
        return out

    _draw(pick)


@fault("xd05", "sampling", "Every request runs with a frequency penalty of 0.2 that nobody asked for, in the draw and in the logprobs.",
       ["semantic/penalty"], must_name=True, located=dict(part="frequency-penalty", value=0.2), settings="generate some dozen tokens with logprobs")
def _():
    def f(sp):
        if sp.frequency_penalty == 0.0:
            sp.frequency_penalty = 0.2

    _on_new_params(f)


@fault("xd06", "sampling", "Temperatures below 0.8 are raised to 0.8, in the draw and in the logprobs.", ["semantic/temperature"], model=L, must_name=True,
       located=dict(part="temperature", floor=0.8), settings="generate at a temperature between 0 and 0.8, e.g. 0.7")
def _():
    def make(orig):
        def apply_temperature(logits, temp, all_random):
            return orig(logits, temp.where(temp < 1e-5, temp.clamp(min=0.8)), all_random)

        return apply_temperature

    wrap(SAMPLER, "Sampler", "apply_temperature", make)


@fault("xd07", "sampling", "Every second token of a request is drawn with the noise of the token before.", ["semantic/seed", "semantic/sampling-bias"],
       located=dict(part="noise", shared="pairs of tokens"), settings="many generations: neighbouring draws are dependent, the first tokens are right")
def _():
    import torch

    kept = {}

    def pick(lg, generators, ids, plain):
        noise = torch.empty_like(lg).exponential_()
        for i, g in generators.items():
            noise[i] = torch.empty(lg.shape[1]).exponential_(generator=g)
        for i, q in enumerate(ids):
            if q in kept:
                noise[i] = kept.pop(q)
            else:
                kept[q] = noise[i].clone()
        if len(kept) > 3000:
            kept.clear()
        return (lg - noise.clamp(min=1e-30).log()).argmax(-1)

    _draw(pick)


@fault("xd08", "sampling", "One draw in twelve is uniform over the twenty likeliest tokens; reported logprobs do not show it.", ["semantic/sampling-bias"], model=L,
       located=dict(part="draw", share=round(1 / 12, 4), over=20), settings=FREQ)
def _():
    import torch

    def pick(lg, generators, ids, plain):
        lucky = torch.rand(lg.shape[0])
        for i, g in generators.items():
            lucky[i] = torch.rand(1, generator=g)[0]
        lucky = lucky < 1 / 12
        top = lg.topk(20, dim=-1)
        flat = torch.full_like(lg, float("-inf")).scatter(-1, top.indices, torch.where(top.values > -1e30, 0.0, float("-inf")))
        return plain(torch.where(lucky.unsqueeze(-1), flat, lg))

    _draw(pick)


@fault("xd09", "sampling", "With n > 1 the first choice is always drawn greedily; its logprobs are those of the requested temperature.",
       ["semantic/sampling-bias", "semantic/temperature"], located=dict(part="draw", choice=0), settings="n >= 2 with a temperature above 0, several times")
def _():
    import torch

    def pick(lg, generators, ids, plain):
        out = plain(lg)
        first = torch.tensor([str(q).startswith("0_") for q in ids])
        return torch.where(first, lg.argmax(-1), out)

    _draw(pick)


arguable("xd09", "semantic/seed")


@fault("xd10", "sampling", "End-of-sequence cannot be drawn among the first 12 generated tokens, and the logprobs are renormalised without it.",
       ["semantic/eos", "semantic/logit-bias"], model=L, located=dict(part="min_tokens", value=12, token=1),
       settings="prompts after which end-of-sequence is likely, fewer than 12 generated tokens")
def _():
    def f(sp):
        if not sp.min_tokens:
            sp.min_tokens = 12

    _on_new_params(f)


arguable("xd10", "semantic/generation-config", "semantic/truncation-mass")


@fault("xd11", "sampling", "Tokens are drawn from logits rounded to fp8 (e4m3); reported logprobs are exact.", ["semantic/sampling-bias"],
       located=dict(part="draw", dtype="float8_e4m3"), settings=FREQ, note="logits are about 10 to 22 where it matters: steps of 1 and 2")
def _():
    import torch

    hidden_draw(lambda x: torch.where(x > -1e30, x.clamp(-440, 440).to(torch.float8_e4m3fn).to(x.dtype), x))


arguable("xd11", "path/head-precision")


@fault("xd12", "sampling", "With n > 1 and a seed all choices get that same seed, so that they are one sample n times.", ["semantic/seed"], model=L, must_name=True,
       located=dict(part="seed", shared="choices"), settings="n >= 2 with a seed and a temperature above 0")
def _():
    def make(orig):
        def _get_child_sampling_params(self, index):
            return orig(self, 0)

        return _get_child_sampling_params

    wrap("vllm.v1.engine.parallel_sampling", "ParentRequest", "_get_child_sampling_params", make)


# ===================================================================== updates


@fault("xu01", "updates", "In an update no key projection arrives (in any layer): the old ones stay.", ["weights/partial"], must_name=True,
       located=dict(tensors="model.layers.*.self_attn.k_proj.weight"), settings=UPD)
def _():
    _remembering(lambda name, old, new: old if "k_proj" in name else new)


arguable("xu01", "weights/stale")


@fault("xu02", "updates", "In an update only the first 256 rows of the input embeddings arrive.", ["weights/rows", "weights/partial"], must_name=True,
       located=dict(tensor="model.embed_tokens.weight", rows=[256, 511]), settings=UPD)
def _():
    def f(name, old, new):
        if "embed_tokens" in name:
            new = new.clone()
            new[256:] = old[256:]
        return new

    _remembering(f)


@fault("xu03", "updates", "After an update the input embeddings are still the old ones; the output head is new (they are one tensor in the checkpoint).",
       ["weights/tied-head", "weights/partial"], model=L, must_name=True, located=dict(part="embedding"), settings=UPD,
       note="the unfaulted CPU server keeps the old head after such an update (its packed copy); here the head is made new, so the two differ")
def _():
    def make(orig):
        def reload_weights(self, *a, **kw):
            import torch

            m = self.model
            first = not hasattr(self, "_exam_old")
            if first:
                self._exam_old = m.model.embed_tokens.weight.detach().clone()
            out = orig(self, *a, **kw)
            self._exam_new = m.model.embed_tokens.weight.detach().clone()
            if first:
                m.logits_processor.register_forward_hook(lambda mod, args, out: torch.nn.functional.linear(args[1], self._exam_new))
                m.model.embed_tokens.register_forward_hook(lambda mod, args, out: torch.nn.functional.embedding(args[0], self._exam_old))
            return out

        return reload_weights

    wrap(RUNNER, "GPUModelRunner", "reload_weights", make)


@fault("xu04", "updates", "An update moves the MLP weights 1.3 times as far as it should; all others are right.", ["weights/multiple"],
       located=dict(tensors="model.layers.*.mlp.*", factor=1.3), settings=UPD)
def _():
    _remembering(lambda name, old, new: old + 1.3 * (new - old) if ".mlp." in name else new)


arguable("xu04", "weights/partial", "weights/stale")


@fault("xu05", "updates", "An update reaches layer 0 by one half only; the other layers are right.", ["weights/fraction"],
       located=dict(tensors="model.layers.0.*", factor=0.5), settings=UPD)
def _():
    _remembering(lambda name, old, new: old + 0.5 * (new - old) if "layers.0." in name else new)


arguable("xu05", "weights/partial", "weights/stale")


@fault("xu06", "updates", "After an update layers 1 and 2 stay old until 25 further requests have come in.",
       ["weights/partial", "weights/torn", "path/nondeterminism"], located=dict(tensors="model.layers.1.*, model.layers.2.*", requests=25), settings=UPD + "; soon after the update and later")
def _():
    state = {"late": False, "path": None, "left": None}
    _r = {}

    def f(n, it):
        for name, t in it:
            if n == 1:
                _r[name] = t.clone()
            elif not state["late"] and (".layers.1." in name or ".layers.2." in name):
                t = _r[name]
            yield name, t

    on_weights(f)

    def make(orig):
        def reload_weights(self, *a, **kw):
            if not state["late"]:
                state["args"], state["left"] = (a, kw), 25
            return orig(self, *a, **kw)

        return reload_weights

    wrap(RUNNER, "GPUModelRunner", "reload_weights", make)

    def g(runner, so):
        if state["left"] is not None:
            state["left"] -= len(so.scheduled_new_reqs)
            if state["left"] < 0:
                state["left"] = None
                state["late"] = True
                a, kw = state["args"]
                runner.reload_weights(*a, **kw)
                state["late"] = False

    on_new_requests(g)


arguable("xu06", "weights/stale")


@fault("xu07", "updates", "Updated MLP weights arrive in fp8 (e4m3), all others exactly; the first load is exact.", ["weights/dtype", "path/weight-quantisation"],
       located=dict(tensors="model.layers.*.mlp.*", dtype="float8_e4m3"), settings=UPD)
def _():
    import torch

    _remembering(lambda name, old, new: new.to(torch.float8_e4m3fn).to(new.dtype) if ".mlp." in name else new)


arguable("xu07", "path/body-precision")


@fault("xu08", "updates", "After an update the softmax scale of layer 0 is 4 per cent too small.", ["weights/buffer"],
       located=dict(layer=0, part="attention-scale", factor=0.96), settings=UPD)
def _():
    def make(orig):
        def reload_weights(self, *a, **kw):
            out = orig(self, *a, **kw)
            a0 = attn_of(self.model, 0).attn
            a0.impl.scale = 0.96 * 64 ** -0.5
            return out

        return reload_weights

    wrap(RUNNER, "GPUModelRunner", "reload_weights", make)


@fault("xu09", "updates", "Updates arrive one step late: each reload installs the checkpoint of the reload before (the first one: the old weights).",
       ["weights/stale", "weights/version-label"], must_name=True, located=dict(factor=0.0, steps=-1), settings=UPD + "; set the label with /update_weight_version")
def _():
    state = {"path": None}

    def make(orig):
        def reload_weights(self, *a, **kw):
            path = kw.get("weights_path")
            kw["weights_path"], state["path"] = state["path"] or self.model_config.model, path
            return orig(self, *a, **kw)

        return reload_weights

    wrap(RUNNER, "GPUModelRunner", "reload_weights", make)


@fault("xu10", "updates", "A new version label is acknowledged and not kept: the weights are new, the label is the old one.", ["weights/version-label"], must_name=True,
       located=dict(part="label"), settings=UPD + "; set the label with /update_weight_version, read /weight_info or the label in answers")
def _():
    def make(orig):
        async def update_weight_version(self, new_version):
            return None

        return update_weight_version

    wrap("vllm.v1.engine.async_llm", "AsyncLLM", "update_weight_version", make)


@fault("xu11", "updates", "In an update the query norm and the key norm of layer 1 arrive under each other's names.", ["weights/swapped"],
       located=dict(tensors=["model.layers.1.self_attn.q_norm.weight", "model.layers.1.self_attn.k_norm.weight"]), settings=UPD)
def _():
    def f(n, it):
        for name, t in it:
            if n > 1 and ".layers.1." in name:
                if "q_norm" in name:
                    name = name.replace("q_norm", "k_norm")
                elif "k_norm" in name:
                    name = name.replace("k_norm", "q_norm")
            yield name, t

    on_weights(f)


# ======================================================================== text


@fault("xt01", "text", "Prompts given as token ids are decoded to text and encoded again by the server.", ["semantic/retokenised", "semantic/tokenizer"], model=L, must_name=True,
       located=dict(part="prompt ids"), settings="prompts given as ids that are no tokeniser's own split (e.g. sampled ones); the prompt ids in the answer show it")
def _():
    def again(self, prompt):
        tok = self.get_tokenizer()
        prompt = dict(prompt)
        ids = tok.encode(tok.decode(prompt["prompt_token_ids"]), add_special_tokens=False)
        prompt["prompt_token_ids"] = list(ids)[:960] or list(prompt["prompt_token_ids"])
        return prompt

    def make(orig):
        def _process_tokens(self, prompt, **kw):
            return orig(self, again(self, prompt), **kw)

        return _process_tokens

    def make2(orig):
        async def _process_tokens_async(self, prompt, **kw):
            return await orig(self, again(self, prompt), **kw)

        return _process_tokens_async

    wrap("vllm.renderers.base", "BaseRenderer", "_process_tokens", make)
    wrap("vllm.renderers.base", "BaseRenderer", "_process_tokens_async", make2)


@fault("xt02", "text", "Chats without a system message get one: 'You are a helpful assistant.'", ["semantic/template"], must_name=True,
       located=dict(part="chat-template"), settings="chat completions without a system message")
def _():
    head = ("{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}")

    def patch(mod):
        orig = mod.resolve_chat_template
        if getattr(orig, "_exam", False):
            return

        def resolve_chat_template(*a, **kw):
            t = orig(*a, **kw)
            return head + t if isinstance(t, str) else t

        resolve_chat_template._exam = True
        mod.resolve_chat_template = resolve_chat_template

    when_imported("vllm.renderers.hf", patch)


@fault("xt03", "text", "Text prompts lose white space at both ends, and runs of spaces become one, before they are tokenised.", ["semantic/tokenizer"],
       located=dict(part="tokenizer"), settings="text prompts (completions or chat) with spaces or a newline at the end, or with double spaces")
def _():
    import re

    def make(orig):
        def apply_pre_tokenization(self, tokenizer, prompt):
            prompt = orig(self, tokenizer, prompt)
            if isinstance(prompt.get("prompt"), str):
                prompt = dict(prompt)
                prompt["prompt"] = re.sub(" +", " ", prompt["prompt"]).strip() or prompt["prompt"]
            return prompt

        return apply_pre_tokenization

    wrap("vllm.renderers.params", "TokenizeParams", "apply_pre_tokenization", make)


arguable("xt03", "semantic/template")


# Is it seen by plain requests (temperature 0.7, up to a thousand, n samples, prompt logprobs, long prompts, streams, concurrency, repeats)?
VISIBLE = dict.fromkeys(("xc04", "xb01", "xr01", "xt02", "xt03"), False)
for _id in ("xb02", "xd07", "xd10", "xd11"):
    FAULTS[_id].meta["marginal"] = True
