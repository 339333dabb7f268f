"""docs/examples: the RayJob has fields that KubeRay documents, its entry point does what it says, and the script is clean.

The whole Slurm script is run by tests/cluster/test_slurm.py. Nothing here was run on Kubernetes.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from iwopd import cli
from iwopd.cluster.verl.reaches import VERL
from waiting import PATIENCE

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
JOB: dict[str, Any] = yaml.safe_load((EXAMPLES / "rayjob.yaml").read_text())
RUN = "/shared/runs/iw-opd-math-seed0"
CRD = "IWOPD_KUBERAY_CRD"
"""Path of KubeRay's `ray.io_rayjobs.yaml`, for the test against the whole schema."""
POD = {"spec": {"terminationGracePeriodSeconds": int, "containers": list, "volumes": list}}
DOCUMENTED: dict[str, Any] = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "entrypoint": str,
        "submissionMode": str,
        "backoffLimit": int,
        "shutdownAfterJobFinishes": bool,
        "rayClusterSpec": {
            "rayVersion": str,
            "authOptions": {"mode": str},
            "headGroupSpec": {"rayStartParams": dict, "template": POD},
            "workerGroupSpecs": [
                {
                    "groupName": str,
                    "replicas": int,
                    "minReplicas": int,
                    "maxReplicas": int,
                    "rayStartParams": dict,
                    "template": POD,
                }
            ],
        },
    },
}
"""Fields of the KubeRay API reference (docs.ray.io, "KubeRay CRD API reference", ray.io/v1) that the example uses."""


def unknown(value: Any, fields: Any, place: str = "") -> list[str]:
    """Entries of `value` that are not among the documented fields, or of another type."""
    if isinstance(fields, dict) and isinstance(value, dict):
        lost = [f"{place}.{key}" for key in value if key not in fields]
        return lost + [fault for key in value if key in fields for fault in unknown(value[key], fields[key], f"{place}.{key}")]
    if isinstance(fields, list) and isinstance(value, list):
        return [fault for number, item in enumerate(value) for fault in unknown(item, fields[0], f"{place}[{number}]")]
    return [] if isinstance(fields, type) and type(value) is fields else [f"{place} is {value!r}"]


def test_the_script_is_clean() -> None:
    linter = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([linter, EXAMPLES / "slurm.sh"], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout
    assert os.access(EXAMPLES / "slurm.sh", os.X_OK)


def test_the_job_has_documented_fields() -> None:
    assert (JOB["apiVersion"], JOB["kind"]) == ("ray.io/v1", "RayJob")
    assert unknown(JOB, DOCUMENTED) == []
    assert unknown({**JOB, "spec": {**JOB["spec"], "entryPoint": "x"}}, DOCUMENTED) == [".spec.entryPoint"]
    assert unknown({**JOB, "spec": {**JOB["spec"], "backoffLimit": "2"}}, DOCUMENTED) == [".spec.backoffLimit is '2'"]


def test_the_job_hangs_together() -> None:
    """Versions, machines and volumes."""
    cluster = JOB["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert cluster["rayVersion"] == version("ray")
    options, _ = cli._parser().parse_known_args(entry_words(JOB["spec"]["entrypoint"])[-1])
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == options.nodes == 4
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"].endswith(f":{VERL}")
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/shared"}
    gpus = workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert int(gpus) == options.gpus_per_node


def entry_words(entrypoint: str) -> list[list[str]]:
    """The `iwopd` commands of an entry point, as words."""
    return [shlex.split(words) for words in re.findall(r"iwopd ([^;]*);", entrypoint)]


@pytest.mark.parametrize("resumed", [False, True])
def test_the_entry_point_starts_or_resumes(tmp_path: Path, resumed: bool) -> None:
    """Through the same shells as on a cluster: the operator's, `ray job submit`'s and Ray's; `iwopd` only notes its words."""
    run = tmp_path / "run"
    run.mkdir()
    if resumed:
        (run / "run.json").touch()
    noted = tmp_path / "words"
    (tmp_path / "iwopd").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >"{noted}"\n')
    (tmp_path / "iwopd").chmod(0o755)
    # `ray job submit -- WORDS` sends subprocess.list2cmdline(WORDS), which Ray gives to a shell.
    ray = f'"{sys.executable}" -c "import subprocess, sys; print(subprocess.list2cmdline(sys.argv[1:]))"'
    entry = JOB["spec"]["entrypoint"].replace(RUN, str(run))
    sent = subprocess.run(["bash", "-c", f"{ray} {entry} ;"], check=True, capture_output=True, text=True).stdout
    place = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(sent, shell=True, check=True, env=place)
    words = noted.read_text().splitlines()
    options, rest = cli._parser().parse_known_args(words)
    assert (options.command, options.engine, options.nodes, options.gpus_per_node) == ("train", "verl", 4, 8)
    assert options.resume == resumed
    assert words[1] == (str(run) if resumed else "/shared/recipes/iw-opd-math.toml")
    assert rest == ([] if resumed else ["--cluster.teacher-tensor-parallel", "2"])


@pytest.mark.skipif(CRD not in os.environ, reason=f"{CRD} names no file: ray.io_rayjobs.yaml of the KubeRay operator's chart")
def test_the_job_is_valid_by_the_operators_schema() -> None:
    import jsonschema  # type: ignore[import-untyped]

    definition = yaml.safe_load(Path(os.environ[CRD]).read_text())
    schema = next(each for each in definition["spec"]["versions"] if each["name"] == "v1")["schema"]["openAPIV3Schema"]
    del schema["properties"]["metadata"]  # any object's, which the schema leaves open
    validator = jsonschema.Draft202012Validator(_closed(schema))
    plain = {name: value for name, value in JOB.items() if name != "metadata"}
    assert [error.message for error in validator.iter_errors(plain)] == []
    wrong = {**plain, "spec": {**plain["spec"], "entryPoint": "x", "backoffLimit": "2"}}
    assert len([error.message for error in validator.iter_errors(wrong)]) == 2


def _closed(schema: Any) -> Any:
    """The same schema with unknown fields refused, as `kubectl apply --validate=strict` does."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _closed(value) for name, value in schema.items()}
    if isinstance(found.get("properties"), dict) and found.get("type") == "object" and "additionalProperties" not in found:
        found["additionalProperties"] = False
    if found.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
    return found
