"""Render examples/kubernetes as kustomize would, and validate every object against Kubernetes' schemas, offline.

    python tools/check_manifests.py            # every overlay, by the schemas that kubernetes-validate brings
    python tools/check_manifests.py --show DIR # what one overlay renders to

Rendered is what these files use of kustomize: resources, components, strategic merge patches, and ConfigMap generators;
`tests/test_manifests.py` compares the result with that of `kubectl kustomize`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parent.parent / "examples" / "kubernetes"
VERSION = "1.31"  # the oldest that is still maintained somewhere; nothing newer is used
KNOWN = {"apiVersion", "kind", "resources", "components", "patches", "configMapGenerator"}
CUSTOM = {"PodMonitor", "PrometheusRule"}  # of the Prometheus operator, whose schemas are not Kubernetes'
MERGED_BY = ("name", "mountPath", "containerPort", "port")

Object = dict[str, Any]


def render(directory: Path) -> list[Object]:
    """The objects of a kustomization, those of its bases included."""
    objects, generated = _assemble(directory)
    names = {key: f"{key}-{_hash(data)}" for key, data in generated.items()}
    for key, data in generated.items():
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": names[key]}, "data": data})
    return [_renamed(one, names) for one in objects]


def _assemble(directory: Path) -> tuple[list[Object], dict[str, dict[str, str]]]:
    objects: list[Object] = []
    generated: dict[str, dict[str, str]] = {}
    _apply(directory, "Kustomization", objects, generated)
    return objects, generated


def _apply(directory: Path, kind: str, objects: list[Object], generated: dict[str, dict[str, str]]) -> None:
    """Add what a kustomization names to what is there; a component changes what is there too."""
    kustomization = yaml.safe_load((directory / "kustomization.yaml").read_text())
    if unknown := set(kustomization) - KNOWN:
        raise SystemExit(
            f"{directory}: {', '.join(sorted(unknown))} is not rendered here; teach tools/check_manifests.py"
        )
    if kustomization["kind"] != kind:
        raise SystemExit(f"{directory}: a {kustomization['kind']} stands where kustomize wants a {kind}")
    for resource in kustomization.get("resources", []):
        path = directory / resource
        more, maps = _assemble(path) if path.is_dir() else (list(yaml.safe_load_all(path.read_text())), {})
        objects += [one for one in more if one]
        generated |= maps
    for component in kustomization.get("components", []):
        _apply(directory / component, "Component", objects, generated)
    for generator in kustomization.get("configMapGenerator", []):
        data = dict(text.split("=", 1) for text in generator.get("literals", []))
        data |= {name: (directory / name).read_text() for name in generator.get("files", [])}
        before = generated.get(generator["name"], {})
        if bool(before) != (generator.get("behavior") == "merge"):
            raise SystemExit(f"{directory}: {generator['name']} needs behavior: merge just where there is one already")
        generated[generator["name"]] = before | data
    for patch in kustomization.get("patches", []):
        change = yaml.safe_load((directory / patch["path"]).read_text())
        found = [one for one in objects if _key(one) == _key(change)]
        if not found and "target" in patch:
            continue  # kustomize takes a target that selects nothing; a patch without one has to find its object
        (target,) = found
        objects[objects.index(target)] = merged(target, change)


def merged(target: Any, change: Any) -> Any:
    """A strategic merge: maps by key, lists of maps by the key that names an entry, null takes away."""
    if isinstance(target, dict) and isinstance(change, dict):
        result = dict(target)
        for key, value in change.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = merged(result[key], value) if key in result else value
        return result
    by = _merge_key(target, change)
    if by is None:
        return change
    entries = {entry[by]: entry for entry in target}
    changed = {entry[by]: merged(entries[entry[by]], entry) if entry[by] in entries else entry for entry in change}
    added = [entry for name, entry in changed.items() if name not in entries]
    return added + [changed.get(name, entry) for name, entry in entries.items()]


def _merge_key(target: Any, change: Any) -> str | None:
    if not (isinstance(target, list) and isinstance(change, list)):
        return None
    both = [*target, *change]
    return next((key for key in MERGED_BY if all(isinstance(one, dict) and key in one for one in both)), None)


def _key(one: Object) -> tuple[str, str]:
    return one["kind"], one["metadata"]["name"]


def _hash(data: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:10]


def _renamed(value: Any, names: dict[str, str], parent: str = "") -> Any:
    """With references to generated ConfigMaps under their generated names."""
    if isinstance(value, list):
        return [_renamed(entry, names, parent) for entry in value]
    if not isinstance(value, dict):
        return value
    is_reference = parent in ("configMap", "configMapRef", "configMapKeyRef")
    return {
        key: names.get(entry, entry)
        if is_reference and key == "name" and isinstance(entry, str)
        else _renamed(entry, names, key)
        for key, entry in value.items()
    }


def validate(one: Object) -> None:
    """Raises kubernetes_validate.ValidationError where an object is not as the schema says; no unknown fields."""
    if one["kind"] in CUSTOM:
        if not one["apiVersion"].startswith("monitoring.coreos.com/"):
            raise SystemExit(f"{_key(one)}: apiVersion {one['apiVersion']}")
        return
    kubernetes_validate.validate(one, VERSION, strict=True)


def directories() -> list[Path]:
    """The base, and every overlay."""
    return [ROOT / "base", *sorted(path for path in (ROOT / "overlays").iterdir() if path.is_dir())]


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--show"]:
        print(yaml.safe_dump_all(render(Path(arguments[1])), sort_keys=False))
        return 0
    failed = 0
    for directory in directories():
        for one in render(directory):
            try:
                validate(one)
            except kubernetes_validate.ValidationError as error:
                failed += 1
                print(f"{directory.relative_to(ROOT)}: {'/'.join(_key(one))}: {error.message}")
    print(f"manifests: {len(directories())} kustomizations, {failed} wrong objects (Kubernetes {VERSION})")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
