"""Read sglang's own types out of its wheel, without installing or importing it, into ``schema.json``.

    pip download --no-deps sglang
    python -m tests.rollout.sglang.make_schema sglang-*.whl

What is kept: the version, for each path of its HTTP server the class that the body is parsed into, the fields of those
classes (type as written, and whether the field must be given), and the options of the server.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

SCHEMA = Path(__file__).with_name("schema.json")
_STRUCTS = "sglang/srt/managers/io_struct.py"
_SAMPLING = "sglang/srt/sampling/sampling_params.py"
_SERVER = "sglang/srt/entrypoints/http_server.py"
_OPTIONS = "sglang/srt/arg_groups/fields/"

Fields = dict[str, dict[str, Any]]


def fields_of(node: ast.ClassDef) -> Fields:
    """Return name -> type and whether it is required, of what a class declares itself."""
    found: Fields = {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            found[item.target.id] = {"type": ast.unparse(item.annotation), "required": item.value is None}
    return found


def classes_in(text: str) -> dict[str, Fields]:
    """Return class -> fields, those of its bases in the same file first."""
    found: dict[str, Fields] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            inherited = {name: field for base in bases for name, field in found.get(base, {}).items()}
            found[node.name] = {**inherited, **fields_of(node)}
    return found


def endpoints_in(text: str) -> dict[str, dict[str, Any]]:
    """Return path -> its methods, and the class that its body is parsed into: None where it takes no body."""
    found: dict[str, dict[str, Any]] = {}
    for node in ast.parse(text).body:
        if not isinstance(node, ast.AsyncFunctionDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).startswith("app."):
                path = decorator.args[0]
                if isinstance(path, ast.Constant):
                    before = found.get(str(path.value), {"methods": []})["methods"]
                    found[str(path.value)] = {"methods": sorted({*before, *_methods(decorator)}), "body": _body(node)}
    return found


def _methods(decorator: ast.Call) -> list[str]:
    assert isinstance(decorator.func, ast.Attribute)
    if decorator.func.attr != "api_route":
        return [decorator.func.attr.upper()]
    return next(ast.literal_eval(keyword.value) for keyword in decorator.keywords if keyword.arg == "methods")


def _body(node: ast.AsyncFunctionDef) -> str | None:
    for argument in node.args.args:
        if argument.arg == "obj" and argument.annotation is not None:
            names = [part.id for part in ast.walk(argument.annotation) if isinstance(part, ast.Name)]
            return next(name for name in names if name not in ("Annotated", "Optional", "Body"))
    return None


def options_in(texts: list[str]) -> Fields:
    """Return the options of the server: name -> type and whether it is required."""
    found: Fields = {}
    for text in texts:
        for fields in classes_in(text).values():
            found |= {name: field for name, field in fields.items() if field["type"].startswith("A[")}
    return {name: {**field, "type": _plain(field["type"])} for name, field in sorted(found.items())}


def _plain(annotation: str) -> str:
    """Return the type in ``A[type, what describes it]``."""
    expression = ast.parse(annotation, mode="eval").body
    assert isinstance(expression, ast.Subscript)
    assert isinstance(expression.slice, ast.Tuple)
    return ast.unparse(expression.slice.elts[0])


def main(wheel: Path) -> None:
    """Write ``schema.json`` beside this file."""
    with ZipFile(wheel) as archive:

        def text(path: str) -> str:
            return archive.read(path).decode()

        classes = classes_in(text(_STRUCTS))
        endpoints = {path: one for path, one in endpoints_in(text(_SERVER)).items() if one["body"] in {None, *classes}}
        options = options_in([text(name) for name in archive.namelist() if name.startswith(_OPTIONS)])
        kept = {name: classes[name] for name in sorted({one["body"] for one in endpoints.values() if one["body"]})}
        kept["SamplingParams"] = classes_in(text(_SAMPLING))["SamplingParams"]
    document = {
        "sglang": wheel.name.split("-")[1],
        "endpoints": dict(sorted(endpoints.items())),
        "classes": kept,
        "options": options,
    }
    SCHEMA.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
