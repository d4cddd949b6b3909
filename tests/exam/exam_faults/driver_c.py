"""As driver.py, for exam C: starts a real vLLM server per fault, asks it, compares with plain transformers, writes `acts` into key-c.yaml.

python driver_c.py healthy-qwen3 healthy-llama as01 ...   (or: all)
The process imports vLLM once and forks for each server, so that a start costs seconds; --spawn starts
`python -m vllm.entrypoints.openai.api_server` in the ordinary way instead.
"""
import concurrent.futures as cf
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

EXAM = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RUN = EXAM + "/run"
PORT = 23411 + os.getpid() % 37 * 100
ENV = dict(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1",
           VLLM_SERVER_DEV_MODE="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
ARGS = ("--dtype float32 --max-model-len 1024 --enforce-eager --logprobs-mode processed_logprobs "
        "--generation-config vllm --max-num-batched-tokens 8192 --host 127.0.0.1").split()
os.environ.update(ENV)
os.environ.pop("VLLM_PLUGINS", None)
os.environ.pop("EXAM_FAULT", None)
sys.path.insert(0, EXAM)
os.environ["PYTHONPATH"] = EXAM
os.nice(15) if os.nice(0) < 15 else None

import torch  # noqa: E402

torch.set_num_threads(1)
import yaml  # noqa: E402

SPAWN = "--spawn" in sys.argv


# --------------------------------------------------------------------- servers
def start(model, fault):
    global PORT
    PORT += 1
    log = open(f"{RUN}/{fault or 'healthy-' + os.path.basename(model)}.log", "w")
    argv = ["--model", model, "--port", str(PORT)] + ARGS
    if SPAWN:
        env = dict(os.environ)
        if fault:
            env["EXAM_FAULT"] = fault
        p = subprocess.Popen([sys.executable, "-m", "vllm.entrypoints.openai.api_server"] + argv, env=env,
                             stdout=log, stderr=log, start_new_session=True)
        pid = p.pid
    else:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
                if fault:
                    os.environ["EXAM_FAULT"] = fault
                sys.argv = ["api_server"] + argv
                import multiprocessing

                real = multiprocessing.get_context
                multiprocessing.get_context = lambda method=None: real("fork" if method == "spawn" else method)
                from vllm.entrypoints.launchers.api_server.entry import main

                main()
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(0)
    t0 = time.time()
    while time.time() - t0 < 240:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2)
            return pid
        except Exception:
            time.sleep(0.3)
            if os.waitpid(pid, os.WNOHANG)[0]:
                break
    raise RuntimeError("server did not start")


def stop(pid):
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    for _ in range(100):
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                break
        except ChildProcessError:
            break
        time.sleep(0.2)
    try:
        os.killpg(pid, signal.SIGKILL)  # the session this driver made for the server
    except (ProcessLookupError, PermissionError):
        pass
    time.sleep(0.3)


def post(path, body, timeout=120):
    req = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", json.dumps(body).encode(),
                                 {"content-type": "application/json"})
    raw = urllib.request.urlopen(req, timeout=timeout).read()
    return json.loads(raw) if raw else None


MODEL = None


def gen(prompt, n_tok, **kw):
    """[(token ids, logprobs)] per choice."""
    body = dict(model=MODEL, prompt=prompt, max_tokens=n_tok, logprobs=0, return_tokens_as_token_ids=True,
                temperature=1.0)
    body.update(kw)
    body = {k: v for k, v in body.items() if v is not None}
    out = post("/v1/completions", body)
    return [([int(t.split(":")[1]) for t in c["logprobs"]["tokens"]], c["logprobs"]["token_logprobs"])
            for c in out["choices"]]


def prompt_lp(prompt):
    out = post("/v1/completions", dict(model=MODEL, prompt=prompt, max_tokens=1, temperature=0, prompt_logprobs=0))
    pl = out["choices"][0]["prompt_logprobs"]
    if len(pl) < len(prompt):
        pl = pl + [{}] * (len(prompt) - len(pl))
    return [pl[i].get(str(prompt[i]), dict(logprob=-99.0))["logprob"] for i in range(1, len(prompt))]


def stream(prompt, n_tok, **kw):
    body = dict(model=MODEL, prompt=prompt, max_tokens=n_tok, logprobs=0, return_tokens_as_token_ids=True,
                temperature=1.0, stream=True)
    body.update(kw)
    req = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(body).encode(),
                                 {"content-type": "application/json"})
    toks, lps = [], []
    for line in urllib.request.urlopen(req, timeout=120):
        line = line.decode().strip()
        if line.startswith("data: {"):
            for c in json.loads(line[6:])["choices"]:
                if c.get("logprobs"):
                    toks += [int(t.split(":")[1]) for t in c["logprobs"]["tokens"]]
                    lps += c["logprobs"]["token_logprobs"]
    return toks, lps


# ------------------------------------------------------------------- reference
HF = {}


def hf(path):
    if path not in HF:
        from transformers import AutoModelForCausalLM

        HF[path] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return HF[path]


@torch.no_grad()
def logits(path, ids):
    return hf(path)(torch.tensor([ids])).logits[0]


def process(lg, T=1.0, top_p=1.0, top_k=0):
    lg = lg / T
    if top_k:
        kth = lg.topk(top_k, dim=-1).values[..., -1:]
        lg = lg.masked_fill(lg < kth, float("-inf"))
    if top_p < 1:
        s, idx = lg.sort(dim=-1, descending=True)
        p = s.softmax(-1)
        drop = (p.cumsum(-1) - p) >= top_p
        lg = lg.masked_fill(torch.zeros_like(drop).scatter(-1, idx, drop), float("-inf"))
    return lg.log_softmax(-1)


def delta(path, prompt, toks, lps, **kw):
    """|reported - reference| per generated token."""
    lp = process(logits(path, prompt + toks)[len(prompt) - 1:-1], **kw)
    ref = lp[torch.arange(len(toks)), torch.tensor(toks)]
    got = torch.tensor([x if x is not None else float("nan") for x in lps])
    d = (got - ref).abs()
    d[torch.isinf(ref)] = 10.0
    return d.nan_to_num(99.0).tolist()


def mean(x):
    return sum(x) / max(1, len(x))


def corpus(name):
    f = f"{RUN}/corpus-{name}.json"
    if os.path.exists(f):
        return json.load(open(f))
    path = f"{EXAM}/model-{name}"
    torch.manual_seed(7)
    seqs = []
    with torch.no_grad():
        o = hf(path).generate(torch.randint(2, 512, (10, 6)), max_new_tokens=760, do_sample=True, top_k=0,
                              temperature=1.0, suppress_tokens=[0, 1])
    seqs = o.tolist()
    best = (0, None)
    for s in seqs:
        p = logits(path, s[:300]).softmax(-1)[:, 1]
        i = int(p[8:].argmax()) + 8
        if float(p[i]) > best[0]:
            best = (float(p[i]), s[: i + 1])
    # a prompt with a broad next-token distribution
    lp = logits(path, seqs[0][:200]).log_softmax(-1)
    ent = -(lp.exp() * lp).sum(-1)
    i = int(ent[10:60].argmax()) + 10
    out = dict(seqs=seqs, eos=best[1], eos_p=best[0], broad=seqs[0][: i + 1])
    json.dump(out, open(f, "w"))
    return out


def second_checkpoint(name):
    src, dst = f"{EXAM}/model-{name}", f"{RUN}/model-{name}-v2"
    if not os.path.exists(dst + "/model.safetensors"):
        from safetensors.torch import load_file, save_file

        os.makedirs(dst, exist_ok=True)
        for f in os.listdir(src):
            if f != "model.safetensors":
                shutil.copy(f"{src}/{f}", dst)
        w = load_file(src + "/model.safetensors")
        g = torch.Generator().manual_seed(3)
        w = {k: (v + 0.05 * v.std().nan_to_num(0.0) * torch.randn(v.shape, generator=g)).contiguous() for k, v in w.items()}
        save_file(w, dst + "/model.safetensors", metadata={"format": "pt"})
    return dst


# ---------------------------------------------------------------------- probes
def tv(path, prompt, toks, **kw):
    p = process(logits(path, prompt)[-1:], **kw)[0].exp()
    f = torch.bincount(torch.tensor(toks), minlength=p.shape[0]).float() / len(toks)
    return float((p - f).abs().sum() / 2), p, f


def freq_probe(path, c, m, **kw):
    pr = c["broad"]
    toks = []
    for i in range(2):
        toks += [t[0][0] for t in gen(pr, 1, n=200, seed=None)]
    m["tv_first"], p, f = tv(path, pr, toks)
    m["tv_first_expected"] = float((p * (1 - p) / len(toks) * 2 / math.pi).sqrt().sum() / 2)
    m["distinct_first"] = len(set(toks))
    low = p < 0.015
    m["share_p<0.015"] = [round(float(f[low].sum()), 4), round(float(p[low].sum()), 4)]
    m["share_id%6"] = [round(float(f[6::6].sum()), 4), round(float(p[6::6].sum()), 4)]
    m["share_top1,top2"] = [[round(float(f[i]), 4), round(float(p[i]), 4)] for i in p.topk(2).indices.tolist()]
    s, idx = p.sort(descending=True)
    tail = idx[(s.cumsum(0) - s) >= 0.92]
    m["share_outside_top0.92"] = [round(float(f[tail].sum()), 4), round(float(p[tail].sum()), 4)]
    e = gen(c["eos"], 1, n=200) + gen(c["eos"], 1, n=200)
    m["eos_logprob"] = mean([abs(lp[0] - math.log(c["eos_p"])) for t, lp in e if t[0] == 1])
    e = [t[0] for t, _ in e]
    m["eos_share"] = [round(e.count(1) / len(e), 4), round(c["eos_p"], 4)]


def draw_probe(path, c, m):
    """Over about a thousand drawn tokens: is their mean log probability, and the share of each rank, as it must be?"""
    pr = c["seqs"][3][:24]
    z, var, ranks, exp_, v2 = 0.0, 0.0, [0, 0], [0.0, 0.0], [0.0, 0.0]
    six, six_e, total = 0, 0.0, 0
    for t, _ in gen(pr, 24, n=48):
        lp = logits(path, pr + t)[len(pr) - 1:-1].log_softmax(-1)
        p = lp.exp()
        own = lp[torch.arange(len(t)), torch.tensor(t)]
        mu = (p * lp).sum(-1)
        z += float((own - mu).sum())
        var += float(((p * lp * lp).sum(-1) - mu * mu).sum())
        top = p.topk(2, dim=-1)
        for r in (0, 1):
            ranks[r] += int((top.indices[:, r] == torch.tensor(t)).sum())
            exp_[r] += float(top.values[:, r].sum())
            v2[r] += float((top.values[:, r] * (1 - top.values[:, r])).sum())
        six += sum(x % 6 == 0 and x > 0 for x in t)
        six_e += float(p[:, 6::6].sum())
        total += len(t)
    m["draws"] = dict(tokens=total, mean_logprob_excess=round(z / total, 4), z_mean_logprob=round(z / math.sqrt(var), 2),
                      rank1=[ranks[0], round(exp_[0], 1)], rank2=[ranks[1], round(exp_[1], 1)],
                      z_rank1=round((ranks[0] - exp_[0]) / math.sqrt(v2[0]), 2),
                      z_rank2=round((ranks[1] - exp_[1]) / math.sqrt(v2[1]), 2), ids_mod6=[six, round(six_e, 1)])


# -------------------------------------------------------- further probes of exam C
def ref_prompt(path, s):
    return logits(path, s).log_softmax(-1)[:-1].gather(-1, torch.tensor(s[1:])[:, None])[:, 0]


def together(jobs, wait=0.0):
    """Each job is (prompt, tokens, options), started in its own thread; the deltas of all."""
    with cf.ThreadPoolExecutor(len(jobs)) as ex:
        fs = []
        for pr, n, kw in jobs:
            fs.append((pr, kw, ex.submit(gen, pr, n, **kw)))
            time.sleep(wait)
        return [(pr, kw, f.result()) for pr, kw, f in fs]


def more(path, c, fam, m):
    S = c["seqs"]
    if fam in ("cache", "all"):
        (t, lp), = gen(S[8][:100], 60, seed=31)
        m["talk_first"] = mean(delta(path, S[8][:100], t, lp))
        back = S[8][:100] + t + S[9][:12]
        (t, lp), = gen(back, 8, temperature=0)
        m["talk_second"] = mean(delta(path, back, t, lp))
        d = []
        for i in range(40):
            s = S[i % 10][100 + 12 * (i // 10): 300 + 12 * (i // 10)]
            (t, lp), = gen(s, 2, temperature=0)
            d += delta(path, s, t, lp)
        m["forty_prompts"] = mean(d)
        d = []
        for t, lp in gen(S[5][:200], 24, n=4, seed=50):
            d += delta(path, S[5][:200], t, lp)
        m["n4_long_prompt"] = mean(d)
    if fam in ("batch", "all"):
        d = []
        for pr, kw, r in together([(S[i][10:40], 60, dict(seed=60 + i, temperature=(0.7, 1.0)[i % 2])) for i in range(6)]):
            d += delta(path, pr, *r[0], T=kw["temperature"])
        m["mixed_temperatures"] = mean(d)
        d = []
        for pr, kw, r in together([(S[i][200:300], 100, dict(seed=70 + i)) for i in range(10)]):
            d += delta(path, pr, *r[0])
        m["ten_over_border"] = mean(d)
        d = []
        for pr, kw, r in together([(S[i][20:60], 120, dict(seed=80 + i)) for i in range(8)], wait=0.03):
            d += delta(path, pr, *r[0])
        m["staggered"] = mean(d)
        d = []
        for t, lp in gen(S[2][:40], 24, n=9, seed=90):
            d += delta(path, S[2][:40], t, lp)
        m["n9"] = mean(d)
    if fam in ("intermittent", "all"):
        s = S[7][:40]
        r = []
        for _ in range(3):
            time.sleep(2.4)
            r.append(float((torch.tensor(prompt_lp(s)) - ref_prompt(path, s)).abs().mean()))
        m["after_pause_max"] = max(r)
    if fam in ("reporting", "all"):
        s = S[7][:60]
        out = post("/v1/completions", dict(model=MODEL, prompt=s, max_tokens=1, temperature=0.7, prompt_logprobs=0))
        pl = out["choices"][0]["prompt_logprobs"]
        got = torch.tensor([pl[i][str(s[i])]["logprob"] for i in range(1, len(s))])
        m["prompt_at_T0.7"] = float((got - ref_prompt(path, s)).abs().mean())
        out = post("/v1/completions", dict(model=MODEL, prompt=s, max_tokens=24, temperature=1.0, seed=5, logprobs=5,
                                           return_tokens_as_token_ids=True))["choices"][0]["logprobs"]
        t = [int(x.split(":")[1]) for x in out["tokens"]]
        ref = logits(path, s + t)[len(s) - 1:-1].log_softmax(-1)
        m["alternatives"] = mean([abs(v - float(ref[i, int(k.split(":")[1])])) for i, d in enumerate(out["top_logprobs"])
                                  for k, v in d.items()])
        d, last, rep, reps = [], [], [], 0
        for t, lp in gen(s, 24, n=24, seed=40):
            x = delta(path, s, t, lp)
            d += x
            last.append(x[-1])
            rep += [x[i] for i in range(1, len(t)) if t[i] == t[i - 1]]
        m["n24"], m["n24_last_token"], m["n24_repeated_tokens"], m["repeated_tokens_seen"] = mean(d), mean(last), mean(rep), len(rep)
        st, _ = stream(S[8][:24], 24, seed=9)
        (wt, _), = gen(S[8][:24], 24, seed=9)
        m["stream_same_tokens"] = st == wt
    if fam in ("sampling", "all"):
        a = [tuple(t) for t, _ in gen(c["broad"], 8, n=6)]
        b = [tuple(t) for t, _ in gen(c["broad"], 8, n=6)]
        m["asked_again_same"] = a == b
        toks = []
        for _ in range(10):
            toks += [t[0] for t, _ in gen(c["broad"], 1, n=200)]
        seen, q, _ = tv(path, c["broad"], toks)
        m["tv_2000"] = [round(seen, 4), round(float((q * (1 - q) / len(toks) * 2 / math.pi).sqrt().sum() / 2), 4)]
        p = float(logits(path, c["broad"])[-1].softmax(-1).max())
        top = int(logits(path, c["broad"])[-1].argmax())
        k = sum(gen(c["broad"], 1, n=2)[0][0][0] == top for _ in range(40))
        m["choice0_is_top"] = [k / 40, round(p, 4)]
        rep = exp_ = var = again = aexp = avar = 0.0
        for pr in (S[3][:24], S[6][:24], S[9][:24]):
            for t, _ in gen(pr, 40, n=40):
                pp = logits(path, pr + t)[len(pr) - 1:-1].softmax(-1)
                for i in range(1, len(t)):
                    q = float(pp[i, t[i - 1]])
                    rep, exp_, var = rep + (t[i] == t[i - 1]), exp_ + q, var + q * (1 - q)
                    w = list(set(t[max(0, i - 4):i]))
                    q = float(pp[i, w].sum())
                    again, aexp, avar = again + (t[i] in w), aexp + q, avar + q * (1 - q)
        m["repeats"] = [rep, round(exp_, 1)]
        m["z_repeats"] = round((rep - exp_) / math.sqrt(max(var, 1e-9)), 2)
        m["among_last4"] = [again, round(aexp, 1)]
        m["z_among_last4"] = round((again - aexp) / math.sqrt(max(avar, 1e-9)), 2)
        d = []
        for t, lp in gen(c["eos"], 2, n=8, seed=3):
            d += delta(path, c["eos"], t, lp)
        m["eos_prompt"] = mean(d)
    if fam in ("text", "all"):
        from transformers import AutoTokenizer

        tok = AutoTokenizer.from_pretrained(path)
        text = " Two  spaces here , and   three;  a newline at the end: \n"
        r = post("/v1/completions", dict(model=MODEL, prompt=text, max_tokens=1, return_token_ids=True))
        m["spaced_text_ids_same"] = r["choices"][0]["prompt_token_ids"] == tok(text)["input_ids"]
        r = post("/v1/completions", dict(model=MODEL, prompt=S[1][:60], max_tokens=1, return_token_ids=True))
        m["prompt_ids_kept"] = r["choices"][0]["prompt_token_ids"] == S[1][:60]


def probe(path, name, fault=None):
    c = corpus(name)
    S = c["seqs"]
    m = {}
    fam = fault.meta["family"] if fault else "all"
    # prompt logprobs
    for key, s in (("short", S[1][:90]), ("long", S[2][:480])):
        ref = logits(path, s).log_softmax(-1)[:-1].gather(-1, torch.tensor(s[1:])[:, None])[:, 0]
        d = (torch.tensor(prompt_lp(s)) - ref).abs()
        m["prompt_" + key] = float(d.mean())
        if key == "long":
            m["prompt_long_by_60"] = [float(f"{x.mean():.2e}") for x in d.split(60)]
    # generation, alone
    d, same = [], []
    for seed in (1, 2, 3):
        (t, lp), = gen(S[3][:24], 48, seed=seed)
        d += delta(path, S[3][:24], t, lp)
        same.append(t)
    m["decode"] = mean(d)
    m["decode_first"] = d[0]
    m["decode_max"] = max(d)
    m["same_seed_same_tokens"] = gen(S[3][:24], 48, seed=1)[0][0] == same[0]
    m["other_seed_other_tokens"] = len({tuple(x) for x in same})
    if fam in ("reporting", "sampling", "all"):
      d = []
      for seed in (4, 5):
        (t, lp), = gen(S[4][:30], 24, seed=seed, temperature=0.7)
        d += delta(path, S[4][:30], t, lp, T=0.7)
      m["decode_T0.7"] = mean(d)
      d = []
      for seed in (6, 7):
        (t, lp), = gen(S[4][:30], 24, seed=seed, top_p=0.9)
        d += delta(path, S[4][:30], t, lp, top_p=0.9)
      m["decode_top_p0.9"] = mean(d)
      (t, lp), = gen(S[5][:30], 24, seed=8, temperature=None)
      m["decode_fields_left_out"] = mean(delta(path, S[5][:30], t, lp))
    pre = S[6][:290]
    if fam in ("cache", "all"):
        # prefix cache: cold, warm, near twin, moved block
        for key in ("cold", "warm", "warm2"):
            (t, lp), = gen(pre, 8, temperature=0)
            m["cache_" + key] = mean(delta(path, pre, t, lp))
        twin = list(pre)
        for i in range(240, 250):
            twin[i] = (twin[i] + 17) % 500 + 5
        (t, lp), = gen(twin, 8, temperature=0)
        m["cache_twin"] = mean(delta(path, twin, t, lp))
        moved = S[6][128:256] + S[7][:20]
        (t, lp), = gen(moved, 8, temperature=0)
        m["cache_moved_block"] = mean(delta(path, moved, t, lp))
    if fam in ("batch", "cache", "all"):
        # batch of eight
        with cf.ThreadPoolExecutor(8) as ex:
            jobs = [(S[i][40:64], ex.submit(gen, S[i][40:64], 80, seed=20 + i)) for i in range(8)]
            d = []
            for pr, j in jobs:
                (t, lp), = j.result()
                d += delta(path, pr, t, lp)
        m["batch8"] = mean(d)
    if fam in ("batch", "all"):
        with cf.ThreadPoolExecutor(4) as ex:
            got = list(ex.map(prompt_lp, [S[i][300:500] for i in range(4)]))
        d = []
        for i, g in enumerate(got):
            s = S[i][300:500]
            ref = logits(path, s).log_softmax(-1)[:-1].gather(-1, torch.tensor(s[1:])[:, None])[:, 0]
            d.append(float((torch.tensor(g) - ref).abs().mean()))
        m["batch4_long_prompts"] = mean(d)
    if fam in ("text", "all"):
        from transformers import AutoTokenizer

        tok = AutoTokenizer.from_pretrained(path)
        text = "The Tide runs Out at Seven, then we Walk home."
        r = post("/v1/completions", dict(model=MODEL, prompt=text, max_tokens=1, return_token_ids=True))
        m["text_ids_same"] = r["choices"][0]["prompt_token_ids"] == tok(text)["input_ids"]
        msg = [dict(role="user", content=text)]
        r = post("/v1/chat/completions", dict(model=MODEL, messages=msg, max_tokens=1, return_token_ids=True))
        want = tok.apply_chat_template(msg, add_generation_prompt=True, tokenize=False)
        m["chat_ids_same"] = r["prompt_token_ids"] == tok(want, add_special_tokens=False)["input_ids"]
    if fam in ("sampling", "reporting", "all"):
        freq_probe(path, c, m)
        if fam in ("sampling", "all"):
            draw_probe(path, c, m)
        first = [t for t, _ in gen(c["broad"], 6, n=16, seed=100)]
        m["n16_distinct"] = len({tuple(t) for t in first})
        few = [tuple(gen(c["broad"], 6, seed=s)[0][0]) for s in range(8)]
        m["seeds_0..7_distinct"] = len(set(few))
        t, lp = stream(S[8][:24], 24, seed=9)
        m["stream"] = mean(delta(path, S[8][:24], t, lp))
    if fam in ("intermittent", "all"):
        s = S[9][:40]
        ref = logits(path, s).log_softmax(-1)[:-1].gather(-1, torch.tensor(s[1:])[:, None])[:, 0]
        r = []
        for i in range(48):
            r.append(float((torch.tensor(prompt_lp(s)) - ref).abs().mean()))
        m["repeat48_max"], m["repeat48_bad"] = max(r), sum(x > 1e-4 for x in r)
        r = []
        for i in range(24):
            (t, lp), = gen(s, 24, temperature=0)
            r += delta(path, s, t, lp)
        m["repeat24_decode_max"], m["repeat24_decode_bad"] = max(r), sum(x > 1e-3 for x in r) / len(r)
        if fault and fault.meta["id"] == "in06":
            r, t0 = [], time.time()
            while time.time() - t0 < 24:
                r.append(float((torch.tensor(prompt_lp(s)) - ref).abs().mean()))
                time.sleep(0.8)
            m["over_24s"] = [float(f"{x:.1e}") for x in r]
    more(path, c, fam, m)
    if fam in ("updates", "all"):
        v2 = second_checkpoint(name)
        gen(pre, 2, temperature=0)
        post("/collective_rpc", dict(method="reload_weights", kwargs=dict(weights_path=v2)))
        post("/update_weight_version", dict(new_version="step-2"))
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{PORT}/reset_prefix_cache", b""), timeout=30)
        info = json.loads(urllib.request.urlopen(f"http://127.0.0.1:{PORT}/weight_info", timeout=30).read())
        m["label"] = info.get("weight_version")
        s = S[1][:90]
        got = torch.tensor(prompt_lp(s))
        for key, q in (("new", v2), ("old", path)):
            ref = logits(q, s).log_softmax(-1)[:-1].gather(-1, torch.tensor(s[1:])[:, None])[:, 0]
            m[f"updated_prompt_vs_{key}"] = float((got - ref).abs().mean())
        (t, lp), = gen(pre, 8, temperature=0)
        m["updated_cached_vs_new"] = mean(delta(v2, pre, t, lp))
        for _ in range(30):
            gen(S[2][:20], 1)
        m["updated_later_vs_new"] = float((torch.tensor(prompt_lp(s)) - ref_prompt(v2, s)).abs().mean())
    return m


# ------------------------------------------------------------------------ main
def load_key():
    f = EXAM + "/key-c.yaml"
    return yaml.safe_load(open(f)) if os.path.exists(f) else {"faults": []}


def save_key(results):
    from exam_faults import faults_c as F

    old = {f["id"]: f for f in load_key()["faults"]}
    out = []
    for i, f in F.FAULTS.items():
        if i in F.OLD:
            continue
        e = dict(f.meta)
        prev = old.get(i, {})
        e["unexplained_ok"] = not e["must_name"]
        e["acts"] = results.get(i) or prev.get("acts")
        e.setdefault("arguable", [])
        e["visible"] = F.VISIBLE.get(i, True)
        out.append({k: v for k, v in e.items() if v is not None or k in ("acts", "located")})
    tmp = EXAM + "/key-c.yaml.tmp"
    with open(tmp, "w") as fh:
        yaml.safe_dump(dict(faults=out), fh, sort_keys=False, width=150, allow_unicode=True)
    os.replace(tmp, EXAM + "/key-c.yaml")


FLAT = ("prompt_short", "prompt_long", "decode", "decode_T0.7", "decode_top_p0.9", "decode_fields_left_out", "cache_cold",
        "cache_warm", "cache_warm2", "cache_twin", "cache_moved_block", "batch8", "batch4_long_prompts", "stream", "repeat48_max",
        "repeat24_decode_max", "updated_prompt_vs_new", "updated_cached_vs_new", "updated_later_vs_new", "eos_logprob", "talk_first", "talk_second", "forty_prompts",
        "n4_long_prompt", "mixed_temperatures", "ten_over_border", "staggered", "n9", "after_pause_max", "prompt_at_T0.7", "alternatives", "n24",
        "n24_last_token", "n24_repeated_tokens", "eos_prompt", "tv_first")


def summarise(m, base, fault):
    ch = {}
    # after a reload the unfaulted CPU server keeps a tied model's old head: 1e-5 stands in for a healthy server there
    base = {k: min(v, 1e-5) if k.startswith("updated_") and k != "updated_prompt_vs_old" else v for k, v in base.items()}
    for k in FLAT:
        if k in m and k in base:
            if k == "tv_first":
                if m[k] > 2.0 * max(base[k], base["tv_first_expected"]):
                    ch[k] = [round(m[k], 4), round(base[k], 4)]
            elif m[k] > max(20 * base[k], 1e-5):
                ch[k] = [float(f"{m[k]:.3g}"), float(f"{base[k]:.2g}")]
    for k in ("text_ids_same", "chat_ids_same", "same_seed_same_tokens", "other_seed_other_tokens", "n16_distinct", "seeds_0..7_distinct", "stream_same_tokens", "asked_again_same", "spaced_text_ids_same", "prompt_ids_kept", "label"):
        if k in m and k in base and m[k] != base[k] and k != "n16_distinct":
            ch[k] = [m[k], base[k]]
    if max(m.get("over_24s", [0])) > 1e-4:
        ch["over_24s_max"] = [max(m["over_24s"]), 0]
    if "n16_distinct" in m and m["n16_distinct"] < base["n16_distinct"] - 4:
        ch["n16_distinct"] = [m["n16_distinct"], base["n16_distinct"]]
    for k in ("z_mean_logprob", "z_rank1", "z_rank2"):
        if abs(m.get("draws", {}).get(k, 0)) > 4:
            ch[k] = [m["draws"][k], 0]
    for k in ("z_repeats", "z_among_last4"):
        if abs(m.get(k, 0)) > 4:
            ch[k] = [m[k], 0]
    if "tv_2000" in m and m["tv_2000"][0] > 2 * m["tv_2000"][1]:
        ch["tv_2000"] = m["tv_2000"]
    if "choice0_is_top" in m:
        a, b = m["choice0_is_top"]
        if abs(a - b) > 4 * math.sqrt(b * (1 - b) / 40):
            ch["choice0_is_top"] = [a, b]
    if "eos_share" in m:
        a, b = m["eos_share"]
        if abs(a - b) > 4 * math.sqrt(b * (1 - b) / 400):
            ch["eos_share"] = [a, b]
    for k in ("share_p<0.015", "share_id%6", "share_outside_top0.92"):
        if k in m:
            a, b = m[k]
            if abs(a - b) > 4 * math.sqrt(b * (1 - b) / 400):
                ch[k] = [a, b]
    return ch


def main():
    global MODEL
    from exam_faults import faults_c as F

    ids = [a for a in sys.argv[1:] if not a.startswith("--")]
    if "all" in ids:
        done = {f["id"] for f in load_key()["faults"] if f.get("acts")} if "--redo" not in sys.argv else set()
        ids = [i for i in F.FAULTS if i not in done and i not in F.OLD]
    if not SPAWN:
        import vllm.entrypoints.launchers.api_server.entry  # noqa: F401
        import vllm.entrypoints.openai.api_server  # noqa: F401
        import vllm.v1.engine.async_llm  # noqa: F401
        import vllm.v1.engine.core  # noqa: F401
        import vllm.v1.worker.cpu_worker  # noqa: F401
        import vllm.v1.executor.multiproc_executor  # noqa: F401
        import vllm.v1.attention.backends.cpu_attn  # noqa: F401
        import vllm.v1.worker.cpu_model_runner  # noqa: F401
        import vllm.model_executor.models.qwen3  # noqa: F401
        import vllm.model_executor.models.llama  # noqa: F401
    bf = RUN + "/baseline.json"
    base = json.load(open(bf)) if os.path.exists(bf) else {}
    for i in ids:
        t0 = time.time()
        fault = None if i.startswith("healthy-") else F.FAULTS[i]
        name = i.split("-")[1] if fault is None else fault.meta["model"]
        MODEL = f"{EXAM}/model-{name}"
        corpus(name)
        pid = None
        try:
            pid = start(MODEL, None if fault is None else i)
            t1 = time.time()
            if fault is not None and fault.meta["family"] == "crash":
                before = mean(delta(MODEL, corpus(name)["seqs"][0][:20], *gen(corpus(name)["seqs"][0][:20], 4)[0]))
                try:
                    gen(corpus(name)["seqs"][0][:740], 2)
                    died = False
                except Exception as e:
                    died = repr(e)[:80]
                res = dict(how="short prompt answered, then a 740-token prompt", changed=dict(died=died) if died else {},
                           size=f"server dies ({died}); before: {before:.1e}")
                save_key({i: res})
                print(i, res, f"start {t1-t0:.0f}s", flush=True)
                continue
            m = probe(MODEL, name, fault)
            if fault is None:
                base[name] = m
                json.dump(base, open(bf, "w"), indent=1)
                print(i, json.dumps(m), f"start {t1-t0:.0f}s total {time.time()-t0:.0f}s", flush=True)
            else:
                ch = summarise(m, base[name], fault)
                top = [(v[0], k) for k, v in ch.items() if k in FLAT and k != "tv_first"]
                size = ", ".join(f"{k} {v:.2g}" for v, k in top[:2]) or ", ".join(f"{k} {ch[k][0]} for {ch[k][1]}" for k in list(ch)[:3])
                res = dict(how=("ordinary start" if SPAWN else "forked start") + ", real server, mean |logprob - transformers fp32| (healthy server in second place), or frequencies [seen, expected]",
                           size=size, changed=ch)
                if "prompt_long_by_60" in m and fault.meta["family"] == "position":
                    res["prompt_long_by_60"] = m["prompt_long_by_60"]
                for k in ("draws", "share_top1,top2", "eos_share", "share_p<0.015", "share_outside_top0.92", "repeat48_bad", "repeat24_decode_bad", "over_24s", "label",
                          "updated_prompt_vs_old", "updated_prompt_vs_new", "updated_later_vs_new", "repeats", "among_last4", "choice0_is_top", "tv_2000"):
                    if k in m and fault.meta["family"] in ("sampling", "intermittent", "updates"):
                        res[k] = m[k]
                json.dump(m, open(f"{RUN}/{i}.json", "w"))
                save_key({i: res})
                print(i, size, "|", ",".join(ch), f"start {t1-t0:.0f}s total {time.time()-t0:.0f}s", flush=True)
        except Exception as e:
            import traceback

            print(i, "FAILED", repr(e)[:300], flush=True)
            traceback.print_exc()
        finally:
            if pid:
                stop(pid)


if __name__ == "__main__":
    main()
