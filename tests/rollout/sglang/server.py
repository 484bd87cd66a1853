"""A server that speaks SGLang's HTTP: it refuses what SGLang's classes would not take, and answers as SGLang does.

Its model is a rule: the next token follows from the tokens so far and from the weights, so that each token tells which
weights made it. What SGLang's scheduler decides is decided alike: an aborted request makes one more token; pausing by
retraction keeps requests; loading empties the cache or fails; memory is given back by an idle or paused server only.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from tests.rollout.sglang.schema import faults, option_faults

VOCAB = 67
EOS = 3  # of the model's configuration
TICK = 0.002
Weights = dict[str, torch.Tensor]


def mark_of(weights: Weights) -> int:
    """Return a number that differs between weights."""
    return int(sum(float(t.double().abs().sum()) for t in weights.values()) * 1000) % 7919


def next_token(ids: list[int], mark: int) -> tuple[int, float]:
    """Return the token after ``ids``, and its log-prob."""
    token = (sum((place + 1) * one for place, one in enumerate(ids)) * 31 + mark) % VOCAB
    return token, -0.125 * (1 + (token + mark) % 16)


@dataclass
class Running:
    body: dict[str, Any]
    ids: list[int]
    mark_adapter: int
    made: list[tuple[float, int, None]] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    abort: bool = False
    reason: dict[str, Any] | None = None


class Model:
    """Everything behind the HTTP."""

    def __init__(self, names: dict[str, tuple[int, ...]], *, key: str = "", tick: float = TICK) -> None:
        self.names, self.key, self.tick = names, key, tick
        self.changed = threading.Condition()
        self.weights: Weights = {}
        self.mark = 0  # of the weights
        self.version = "default"
        self.adapters: dict[str, int] = {}
        self.running: list[Running] = []
        self.asked: list[tuple[str, Any]] = []
        self.paused = self.over = False
        self.away: set[str] = set()
        self.refuses: dict[str, str] = {}
        self.flushed = 0
        self.at_most: int | None = None  # tokens that a request makes, unless it is aborted: a test's way to wait
        self.thread = threading.Thread(target=self.decode, daemon=True)
        self.thread.start()

    def decode(self) -> None:
        while not self.over:
            with self.changed:
                if not self.paused and self.running:
                    self.one_tick()
                    self.changed.notify_all()
                self.changed.wait(self.tick if self.running and not self.paused else 0.05)

    def one_tick(self) -> None:
        for one in list(self.running):
            if self.at_most is not None and len(one.made) >= self.at_most and not one.abort:
                continue
            assert not self.away, "SGLang would crash: it computes without its memory"
            params = one.body["sampling_params"]
            token, logprob = next_token(one.ids, self.mark + one.mark_adapter)
            one.ids.append(token)
            one.made.append((logprob, token, None))
            one.versions.append(self.version)
            if not params["ignore_eos"] and token in {*params["stop_token_ids"], EOS}:
                one.reason = {"type": "stop", "matched": token}
            elif one.abort:
                one.reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            elif len(one.made) >= params["max_new_tokens"]:
                one.reason = {"type": "length", "length": params["max_new_tokens"]}
            if one.reason is not None:
                self.running.remove(one)
                self.changed.notify_all()

    def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self.changed:
            self.changed.wait_for(lambda: not self.paused)  # as the tokenizer's process does
            mark = 0
            if body.get("lora_path") is not None:
                if body["lora_path"] not in self.adapters:
                    return 400, {"error": {"message": f"no adapter {body['lora_path']}"}}
                mark = self.adapters[body["lora_path"]]
            one = Running(body, list(body["input_ids"]), mark)
            self.running.append(one)
            self.changed.notify_all()
            self.changed.wait_for(lambda: one.reason is not None or self.over)
            if one.reason is None:
                return 500, {"error": {"message": "the server is going"}}
        meta = {
            "id": body["rid"],
            "finish_reason": one.reason,
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": one.versions[-1] if one.versions else self.version,
            "output_token_logprobs": one.made,
            "completion_tokens": len(one.made),
        }
        if len(set(one.versions)) > 1:
            meta["weight_versions"] = spans_of(one.versions)
        return 200, {"text": "", "output_ids": [token for _, token, _ in one.made], "meta_info": meta}

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path in self.refuses:
            return 400, {"success": False, "message": self.refuses[path]}
        if path == "/generate":
            return self.generate(body)
        with self.changed:
            method = getattr(self, "on_" + path.strip("/"))
            status, answer = method(body)
            self.changed.notify_all()
        return status, answer

    def on_ready(self, body: None) -> tuple[int, Any]:
        return 200, None

    def on_model_info(self, body: None) -> tuple[int, Any]:
        return 200, {"model_path": "m", "weight_version": self.version, "is_generation": True}

    def on_pause_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert body["mode"] == "retract"
        self.paused = True
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def on_continue_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.paused = False
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def on_abort_request(self, body: dict[str, Any]) -> tuple[int, Any]:
        for one in self.running:
            one.abort = one.abort or body.get("abort_all", False) or one.body["rid"].startswith(body["rid"])
        return 200, None

    def on_release_memory_occupation(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.running and not self.paused:
            return 500, {"error": "release_memory_occupation should be called only when server is idle."}
        self.away |= set(body["tags"])
        if "weights" in body["tags"]:
            self.weights = {}
        return 200, None

    def on_resume_memory_occupation(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not set(body["tags"]) <= self.away:
            return 500, {"error": "KeyError"}
        self.away -= set(body["tags"])
        return 200, None

    def on_update_weights_from_disk(self, body: dict[str, Any]) -> tuple[int, Any]:
        if "weights" in self.away:
            return 400, {"success": False, "message": "no memory"}
        found: Weights = {}
        for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
            found |= load_file(file)
        unknown = [n for n, t in found.items() if tuple(t.shape) != self.names.get(n)]
        if unknown or not found:
            return 400, {"success": False, "message": f"Failed to update weights: {unknown}"}
        self.weights = {**self.weights, **found}
        self.version, self.mark = body["weight_version"], mark_of(self.weights)
        if body["flush_cache"] and self.running and not self.paused:
            return 400, {"success": False, "message": "Weights were updated, but the cache was not flushed"}
        self.flushed += 1
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def on_load_lora_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        config = json.loads((Path(body["lora_path"]) / "adapter_config.json").read_text())
        tensors = load_file(Path(body["lora_path"]) / "adapter_model.safetensors")
        if config["peft_type"] != "LORA" or body["lora_name"] in self.adapters:
            return 400, {"success": False, "error_message": "Failed to load LoRA adapter"}
        self.adapters[body["lora_name"]] = 1 + mark_of(tensors)
        return 200, {"success": True, "loaded_adapters": dict.fromkeys(self.adapters, "")}

    def on_unload_lora_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.changed.wait_for(lambda: not any(r.body.get("lora_path") == body["lora_name"] for r in self.running))
        del self.adapters[body["lora_name"]]
        return 200, {"success": True, "loaded_adapters": dict.fromkeys(self.adapters, "")}

    def on_update_weight_version(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.version = body["new_version"]
        return 200, {"success": True, "message": "", "new_version": self.version}

    def on_get_weights_by_name(self, body: dict[str, Any]) -> tuple[int, Any]:
        tensor = self.weights.get(body["name"])
        return 200, None if tensor is None else tensor.float().tolist()[: body["truncate_size"]]


def spans_of(versions: list[str]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for place, version in enumerate(versions):
        if not spans or spans[-1]["version"] != version:
            spans.append({"version": version, "start": place, "end": place})
        spans[-1]["end"] = place + 1
    return spans


def http_server(model: Model, port: int = 0) -> ThreadingHTTPServer:
    """Return a server on the loopback interface."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.serve(None)

        def do_POST(self) -> None:
            self.serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def serve(self, body: Any) -> None:
            status, answer = 401, {"error": "Unauthorized"}
            if not model.key or self.headers.get("Authorization") == f"Bearer {model.key}":
                model.asked.append((self.path, body))
                wrong = faults(self.path, self.command, body)
                status, answer = (400, {"error": wrong}) if wrong else model.answer(self.path, body)
            data = b"" if answer is None and self.path != "/get_weights_by_name" else json.dumps(answer).encode()
            with suppress(ConnectionError):  # who asked has gone
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    return server


def main() -> None:
    """A process that is started as SGLang's is, ``--config FILE``, but for ``--tick SECONDS`` of a decode step."""
    options = yaml.safe_load(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    wrong = option_faults(options)
    assert not wrong, wrong
    from rlctl.keys.model_spec import ModelSpec
    from rlctl.keys.shapes import tensor_shapes

    names = tensor_shapes(ModelSpec.from_folder(options["model-path"]))
    print("The server is fired up and ready to roll!", flush=True)
    tick = float(sys.argv[sys.argv.index("--tick") + 1])
    http_server(Model(names, key=options["api-key"], tick=tick), options["port"]).serve_forever()


if __name__ == "__main__":
    main()
