"""Everything that reads what others wrote: how the product itself writes it, and how it is read."""

import asyncio
import gzip
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import zstandard

from pipelines.core.checked_json import parse_model
from pipelines.core.errors import UserError
from pipelines.core.product import RECIPES
from pipelines.core.settings import load_settings
from pipelines.core.storage import md5
from pipelines.data import documents
from pipelines.data.normalize import conversation, document
from pipelines.data.reading import sources, text_readers
from pipelines.data.reading.instruction import Fields
from pipelines.data.tokens import chat_template, tokenizer
from pipelines.data.tokens.token_shards import ShardWriter, document_lengths
from pipelines.datasets.dvc_objects import File, ObjectStore, hash_folder
from pipelines.datasets.versions import DatasetVersion
from pipelines.evaluation import held_out_documents
from pipelines.loading.sources.shard_cache import open_cache
from pipelines.loading.token_dataset import TokenDataset
from pipelines.models import config_json, lora, model_folder, peft_format, presets, pretrained
from pipelines.models.config import DecoderConfig
from pipelines.models.transformer import Transformer
from pipelines.orchestration.jobs_api import JobsApi
from pipelines.parallel.layout import Layout
from pipelines.parallel.mesh import build_mesh
from pipelines.parallel.parallelize import Parallelized
from pipelines.recipe import bias_templates, recipe_files
from pipelines.recipe.data_section import Instruction, Source
from pipelines.recipe.training_section import Adapter
from pipelines.registry import integrity, registry, signing
from pipelines.run import logbook, progress, records, workspace
from pipelines.tracking import rest
from pipelines.tracking.curves import Curves
from pipelines.training.checkpoint.checkpointer import Checkpoints, Position
from pipelines.training.checkpoint.store import CheckpointStore
from pipelines.training.metrics import History

CPU = torch.device("cpu")
TEXT = "The quick brown fox jumps over the lazy dog.\n\nπ ≈ 3.14159, “so” it is.\n" * 12
TURNS = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because é."}]
SHAPE = DecoderConfig(1, 16, 2, 1, 24, vocab_size=50, context_length=16)


class Reader(NamedTuple):
    """What reads files."""

    make: Callable[[Path], object]  # writes sound files into a folder
    read: Callable[[Path, Path], object]  # reads the folder; what it writes goes to another
    told: str = ""  # what an error may name instead of the file, as a pattern
    errors: tuple[type[Exception], ...] = (UserError,)
    spoiled: str = "**/*"  # the files that are spoiled


def put(**contents: Any) -> Callable[[Path], None]:
    """Write files, whose names have `__` for a slash or dash and `_` for a dot."""

    def make(folder: Path) -> None:
        for name, content in contents.items():
            path = folder / name.replace("__", "-").replace("_", ".")
            text = content if isinstance(content, str | bytes) else json.dumps(content)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())

    return make


def texts(instruction: Instruction | None = None, kind: str = "auto") -> Any:
    """Read documents as the first pass of preprocess does."""

    def read(folder: Path, _: Path) -> None:
        source = Source(kind="files", path=str(folder), format=kind)
        fields = Fields("text", instruction or Instruction())
        inputs = sources.list_inputs(source)
        for batch in text_readers.plan_reads(source, inputs, batch_bytes=1 << 10):
            for each in batch:
                list(islice(text_readers.read_documents(each, fields), 300))

    return read


def packed(name: str, text: str) -> Callable[[Path], None]:
    both = {".gz": gzip.compress(text.encode()), ".zst": zstandard.compress(text.encode())}
    return put(**{f"a{name}": text} | {f"{name[1:]}{end}": both[end] for end in both})


def parquet(folder: Path) -> None:
    table = pa.table({"text": [TEXT[:n] for n in range(60)], "n": range(60), "m": [TURNS] * 60})
    for kind in ("snappy", "zstd", "none"):
        pq.write_table(table, folder / f"{kind}.parquet", compression=kind, row_group_size=25)


def kept_documents(folder: Path) -> None:
    with documents.DocumentWriter(folder / "train-00000.parquet") as writer:
        for number in range(20):
            writer.add(document(f"a:{number}", f"{number} {TEXT}"))
        writer.add(conversation("b", tuple((turn["role"], turn["content"]) for turn in TURNS)))


def read_kept(folder: Path, _: Path) -> None:
    held_out_documents.conversations(held_out_documents.read_documents(folder, "train", 1 << 14))


def read_overrides(folder: Path, _: Path) -> None:
    with suppress(OSError):
        text = (folder / "set.yaml").read_text(errors="replace")
        recipe = recipe_files.load_recipe("debug")
        recipe_files.override_values(recipe, recipe_files.parse_overrides(text))


def shards(folder: Path) -> None:
    output = records.output_folder(folder, "preprocess")
    output.mkdir(parents=True)
    writer = ShardWriter(output / "train-00000", 500, masked=True)
    for length in (40, 3, 0, 90):
        writer.add(np.arange(length), mask=np.ones(length, np.uint8))
    split = records.Split(documents=4, bytes=133, tokens=133, shards=(writer.close(),))
    empty = records.Split(documents=0, bytes=0, tokens=0, shards=())
    dataset = records.DatasetRef(vocab_size=500, train=split, validation=empty)
    records.PreprocessRecord(dataset=dataset, stats={}).write(folder)


def read_shards(folder: Path, _: Path) -> None:
    dataset = records.PreprocessRecord.read(folder).dataset
    output = records.output_folder(folder, "preprocess")
    found = {"md5": "bin", "index_md5": "idx", "mask_md5": "mask"}
    paths = {key: output / f"train-00000.{end}" for key, end in found.items()}
    hashes = {key: md5(path) for key, path in paths.items() if path.is_file()}
    first = dataset.train.shards[:1]
    honest = tuple(shard.model_copy(update=hashes) for shard in first)  # as if written so
    for each in (honest, first):
        split = dataset.train.model_copy(update={"shards": each})
        for packed_length in (None, 7):
            tokens = TokenDataset(output, split, 7, packed_length=packed_length, documents=True)
            numbers = np.arange(min(len(tokens), 8))
            for ranges in (tokens.tokens(numbers), tokens.mask(numbers))[: 1 + tokens.has_mask]:
                out = torch.empty(len(numbers), ranges.length, dtype=torch.uint8)
                tokens.open(CPU).read(ranges, out)()
            assert tokens.most_documents and len(tokens.documents(numbers))
    list(document_lengths(output, dataset))


def checkpoints(folder: Path) -> Checkpoints:
    model = Transformer(SHAPE)
    model.init_weights(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    part = Parallelized(build_mesh(Layout(), CPU), [model])
    return Checkpoints(CheckpointStore(folder), part, optimizer)


def checkpoint(folder: Path) -> None:
    run = checkpoints(folder)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    run._model.parts[0](tokens, targets_BS=tokens).backward()
    run._optimizer.step()
    run.save(Position(3, 1.5))
    run.wait()


def model(folder: Path) -> Transformer:
    made = Transformer(SHAPE)
    made.init_weights(seed=1)
    pretrained.save_pretrained(made, folder, end_of_text=0)
    return made


def read_model(folder: Path, _: Path) -> None:
    model_folder.fingerprint(folder)
    pretrained.load_pretrained(folder)


def model_in_parts(folder: Path) -> None:
    names, part = list(model(folder).state_dict()), "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(folder / part)
    index = {"weight_map": {f"model.{name}": part for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def configs(folder: Path) -> None:
    for preset in {each.family: each for each in presets.PRESETS.values()}.values():
        dense = min(1, preset.first_k_dense_replace)
        small = replace(preset, layers=2, first_k_dense_replace=dense).sized(500, 64)
        (folder / preset.family).mkdir()
        values = config_json.write_config(small, "bfloat16")
        put(config_json=values)(folder / preset.family)


def read_configs(folder: Path, _: Path) -> None:
    for path in sorted(folder.iterdir()):
        with torch.device("meta"):
            Transformer(model_folder.load_config(path))


ADAPTER = Adapter(kind="lora", rank=2)


def adapter(folder: Path) -> None:
    made = model(folder / "base")
    lora.add_adapters(made, lora.chosen_sizes(made, ADAPTER), ADAPTER)
    lora.init_adapters(made, seed=1)
    peft_format.save_adapter(made, folder / "adapter")


def read_adapter(folder: Path, _: Path) -> None:
    made = pretrained.load_pretrained(folder / "base")
    sizes = peft_format.stored_sizes(folder / "adapter", made.config)
    lora.add_adapters(made, sizes, ADAPTER)
    peft_format.load_adapter(made, folder / "adapter")


def read_tokenizer(folder: Path, out: Path) -> None:
    tokenizer.copy_pretrained(folder, out / "tokenizer")
    encoder = tokenizer.Encoder(folder)
    assert len(encoder.encode([TEXT[:100]])) == 1 and encoder.engine
    chat_template.own_template(folder), chat_template.template_variables(folder)


def signed_model(folder: Path) -> None:
    model(folder)
    signing.ensure_key_pair(load_settings().signing_key)
    signing.sign(folder)


def read_signed_model(folder: Path, _: Path) -> None:
    integrity.check_folder(folder, "m@1")
    signing.verify(folder, "m@1")


def run(folder: Path) -> None:
    facts = {"git_commit": "c", "dirty": False, "recipe_fingerprint": "f"}
    workspace.Run(dag_run_id="r", **facts).write(folder)
    shutil.copy(RECIPES / "debug.yaml", folder / "params.yaml")
    counts = {"parameters": 1, "steps": 1, "tokens": 1, "metrics": {"loss": 1.0}}
    records.TrainRecord(model="model", model_hash="h", **counts).write(folder)


def read_run(folder: Path, _: Path) -> None:
    workspace.Run.read(folder), records.TrainRecord.read(folder), workspace.read_recipe(folder)


ENTRY = {"kind": "stall", "stage": "train", "cause": "c", "done": "d"}


def logs(folder: Path) -> None:
    for step in range(5):
        progress.ProgressWriter(folder, "train", interval=0).write(step, 5, "steps", loss=1.0)
        entry = logbook.Entry(key=f"{step}", step=step, **ENTRY)
        logbook.append_line(folder / "logbook.jsonl", entry.model_dump_json())
        History(folder / "history.jsonl").add({"step": step, "loss": 2.0})
    (folder / "curves.jsonl").write_text('{"step": 1, "milliseconds": 5, "values": {"a": 1.0}}\n')


def read_logs(folder: Path, out: Path) -> None:
    shutil.copytree(folder, out, dirs_exist_ok=True)
    assert all(each.line() for each in progress.ProgressReader(out).read())
    progress.last_progress(out, "train")
    logbook.note(out, logbook.Entry(key="new", **ENTRY))
    logbook.page(logbook.read_logbook(out))
    History(out / "history.jsonl").add({"step": 9, "loss": 1.0})
    Curves("run", lambda: None, out / "curves.jsonl").close(0)


class Answers(BaseHTTPRequestHandler):
    """Every answer is a file of the server's folder, named as the path."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = self.path.partition("?")[0].strip("/").replace("/", "-")
        content = b""
        with suppress(OSError):
            content = (self.server.folder / f"{name}.json").read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):  # who asked has gone
            self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def answering(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.folder = folder
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


JOB = {"submission_id": "j", "status": "FAILED", "driver_exit_code": 1, "metadata": {"a": "b"}}


def ask_ray(folder: Path, _: Path) -> None:
    async def ask(url: str) -> None:
        async with JobsApi(url, folder / "token") as jobs:
            await asyncio.gather(jobs.get("j"), jobs.jobs(), jobs.logs("j"))

    with answering(folder) as url:
        asyncio.run(ask(url))


RUN = {"info": {"run_id": "r", "experiment_id": "1", "status": "RUNNING"}, "data": {"params": []}}
NAME = {"name": "m", "aliases": [{"alias": "champion", "version": "1"}], "latest_versions": []}
VERSION = {"name": "m", "version": "1", "creation_timestamp": 5, "tags": [{"key": "a"}]}
MLFLOW = {
    "runs-get": {"run": RUN},
    "runs-search": {"runs": [RUN]},
    "experiments-search": {"experiments": [{"experiment_id": "1"}], "next_page_token": ""},
    "experiments-get-by-name": {"experiment": {"experiment_id": "1"}},
    "registered-models-get": {"registered_model": NAME},
    "registered-models-search": {"registered_models": [NAME]},
    "model-versions-search": {"model_versions": [VERSION]},
    "model-versions-get-download-uri": {"artifact_uri": "s3://b/a"},
}


def mlflow(folder: Path) -> None:
    for name, answer in MLFLOW.items():
        (folder / f"api-2.0-mlflow-{name}.json").write_text(json.dumps(answer))


def ask_mlflow(folder: Path, _: Path) -> None:
    with answering(folder) as url:
        os.environ.update(MLFLOW_TRACKING_URI=url, MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
        problems = []
        for ask in (
            *(lambda: rest.run_status("r"), lambda: rest.oldest_run("x"), registry.list_models),
            *(lambda: registry.versions_of("m"), lambda: rest.artifact_address("m", 1)),
        ):  # each, whatever the one before it says
            try:
                ask()
            except (UserError, httpx.HTTPError) as problem:
                problems.append(problem)
    if problems:
        raise problems[0]


def pushed(folder: Path) -> None:
    data, store = folder / "data", ObjectStore(str(folder / "remote"))
    data.mkdir()
    put(record_json={}, train_bin=b"abc" * 50)(data)
    tree = hash_folder(data)
    store.push(tree)
    shutil.rmtree(data)
    split = {"documents": 1, "bytes": 1, "tokens": 1, "shards": []}
    dataset = {"vocab_size": 500, "train": split, "validation": split}
    version = {"name": "d", "version": 1, "directory_hash": tree.hash, "bytes": 5, "files": 2}
    version |= {"dataset": dataset, "stats": {}, "recipe": {}, "source": {}, "validation": {}}
    listing = store.read(File("its list", tree.hash))
    put(listing_json=listing, version_json=version | {"run": {}})(folder)


def read_pushed(folder: Path, out: Path) -> None:
    with suppress(OSError):
        parse_model((folder / "version.json").read_bytes(), DatasetVersion, "d@1")
    shutil.copytree(folder / "remote", out / "remote", symlinks=True)
    listing = folder / "listing.json"
    oid = md5(listing) if listing.is_file() else "0" * 32
    place = out / "remote" / "files" / "md5" / oid[:2] / f"{oid[2:]}.dir"
    place.parent.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):
        shutil.copy(listing, place)
    store = ObjectStore(str(out / "remote"))
    files = store.listing(f"{oid}.dir")
    store.fetch(files, out / "data", lambda _: None)


VARIABLES = {"PENSTOCK_RAY_PORT": "1", "PENSTOCK_SHIP_CODE": "0", "PENSTOCK_SHARD_CACHE_GB": "1"}
VARIABLES |= {"PENSTOCK_DATABASE_URL": "postgresql://u@h:5432", "PENSTOCK_DATASETS_URL": "x"}


def read_settings(folder: Path, out: Path) -> None:
    with suppress(OSError, ValueError, AttributeError, RecursionError):  # it is no reader of ours
        given = json.loads((folder / "environment.json").read_bytes())
        os.environ |= {key: str(given.get(key, "")).replace("\0", "") for key in VARIABLES}
    os.environ |= {"PENSTOCK_HOME": str(folder), "PENSTOCK_SHARD_CACHE": str(out)}
    load_settings(), open_cache()


def copied(path: Path) -> Callable[[Path], object]:
    return lambda folder: shutil.copy(path, folder / path.name)


TEMPLATES = bias_templates.SHIPPED_TEMPLATES
PAIR = {"prompt": "Why?", "chosen": "Because it is so.", "rejected": "No."}
RATED = {"prompt": "Why?", "completions": [{"content": "x", "rating": 5}, {"content": "y"}]}
LABELLED = {"prompt": [{"role": "user", "content": "Why?"}], "response": "So.", "label": True}
ASKED = Instruction(kind="prompt_response")
READERS = {
    "text": Reader(packed("_txt", TEXT), texts()),
    "jsonl": Reader(packed("_jsonl", (json.dumps({"text": TEXT, "n": 1}) + "\n") * 9), texts()),
    "messages": Reader(put(a_jsonl={"messages": TURNS}), texts(Instruction(kind="messages"))),
    "pairs": Reader(put(a_jsonl=PAIR), texts(Instruction(kind="preference"))),
    "rated": Reader(put(a_jsonl=RATED), texts(Instruction(kind="rated"))),
    "labelled": Reader(put(a_jsonl=LABELLED), texts(Instruction(kind="labelled"))),
    "docstrings": Reader(copied(Path(json.__file__)), texts(ASKED, "docstrings")),
    "parquet": Reader(parquet, texts()),
    "kept documents": Reader(kept_documents, read_kept, "run preprocess"),
    "recipe": Reader(
        copied(RECIPES / "llama3-8b-dpo.yaml"),
        lambda folder, _: recipe_files.load_recipe(folder / "llama3-8b-dpo.yaml"),
    ),
    "overrides": Reader(put(set_yaml="train.lr=3e-4; seed=3"), read_overrides, "--set|debug"),
    "bias templates": Reader(
        copied(TEMPLATES),
        lambda folder, _: bias_templates.load_bias_templates(str(folder / TEMPLATES.name)),
    ),
    "token shards": Reader(shards, read_shards, "training tokens|sequence_length"),
    "checkpoint": Reader(checkpoint, lambda folder, _: checkpoints(folder).restore()),
    "model": Reader(model, read_model),
    "model in parts": Reader(model_in_parts, read_model),
    "configs": Reader(configs, read_configs),
    "adapter": Reader(adapter, read_adapter, spoiled="adapter/*"),
    "tokenizer": Reader(
        lambda folder: tokenizer.save_tokenizer(tokenizer.train_bpe([TEXT], 300), folder),
        read_tokenizer,
    ),
    "signed model": Reader(signed_model, read_signed_model, "m@1"),
    "run": Reader(run, read_run),
    # A disk that fails is the environment's, and a line of progress may be read a second later.
    "logs": Reader(logs, read_logs, "Errno", (UserError, OSError, shutil.Error)),
    "ray": Reader(
        put(api__jobs__j_json=JOB, api__jobs_json=[JOB], api__jobs__j__logs_json={"logs": "x"}),
        ask_ray,
        "127.0.0.1",
        (UserError, httpx.HTTPError),
    ),
    "mlflow": Reader(mlflow, ask_mlflow, "MLflow", (UserError, httpx.HTTPError)),
    "dataset version": Reader(pushed, read_pushed, "d@1", (UserError, OSError)),
    "settings": Reader(
        put(ports_json={"PENSTOCK_RAY_PORT": 8265}, environment_json=VARIABLES),
        read_settings,
        "PENSTOCK_",
    ),
}
