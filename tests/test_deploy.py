"""The files that put raypipe on a cluster, held against those who read them.

No cloud answers here. Ray's own code takes cluster.yaml through all that `ray up` does before it waits for a
machine, on moto's AWS; Google's description of its API, Kubernetes' schemas, a kept model of KubeRay's and
hadolint judge the rest.
"""

from __future__ import annotations

import copy
import fnmatch
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import googleapiclient
import jsonschema
import kubernetes_validate
import moto
import pytest
import yaml
from moto.ec2.models.instance_types import InstanceTypeBackend
from ray.autoscaler._private.aws.config import bootstrap_aws
from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
from ray.autoscaler._private.gcp.config import get_node_type
from ray.autoscaler._private.gcp.node import GCPNodeType
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)
from ray.autoscaler._private.util import prepare_config, validate_config

from raypipe.rayext import placement
from raypipe.rayext.cluster_state import limits_of

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
RAY_UP = [
    ROOT / "cluster.yaml",
    DEPLOY / "gcp.yaml",
    DEPLOY / "aws-p5.yaml",
    DEPLOY / "gcp-a3.yaml",
]
GCP = [path for path in RAY_UP if path.name.startswith("gcp")]
AWS = [path for path in RAY_UP if path not in GCP]
LABEL = {placement.LABEL_KEY: placement.LABEL_VALUE}
EC2 = "arn:aws:ec2:us-west-2:123456789012"

sys.path.insert(0, str(ROOT / "tests/deploy"))
from aws_cli import AwsCli  # noqa: E402  isort: skip


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


@pytest.fixture(scope="module")
def kuberay() -> dict[str, dict[str, Any]]:
    """Its parts, by kind, or by name where there are several of a kind."""
    parts = list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))
    kinds = [part["kind"] for part in parts]
    return {
        kind if kinds.count(kind) == 1 else part["metadata"]["name"]: part
        for kind, part in zip(kinds, parts, strict=True)
    }


# ray up


@pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.name)
def test_ray_accepts_the_cluster_and_its_parts_say_the_same(path: Path) -> None:
    given = load(path)
    config = prepare_config(copy.deepcopy(given))
    validate_config(config)
    groups = config["available_node_types"]
    cpus = [group for name, group in groups.items() if name.startswith("cpu")]
    assert len(cpus) > 1, "spot machines of one type alone"
    assert all(cpu["labels"] == LABEL and not cpu["min_workers"] for cpu in cpus)
    head = groups["head"]
    gpu = groups["gpu"]
    assert head["resources"] == {"CPU": 0} and head["max_workers"] == 0
    assert not gpu["min_workers"] and not gpu.get("labels") and not head.get("labels")
    assert gpu["resources"]["GPU"] < gpu["resources"]["CPU"], "a share for transforms"
    # Whatever CPU nodes there are, a lost GPU node can be replaced.
    most = [group["max_workers"] for group in groups.values()]
    assert config["max_workers"] == sum(most)
    # Nothing of Ray's defaults, which install a nightly Ray, comes with it.
    for name in ("head_setup_commands", "worker_setup_commands"):
        assert config[name] == given["setup_commands"]


@pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.name)
def test_what_ray_up_copies_runs_and_mounts_is_there(path: Path) -> None:
    config = load(path)
    mounted, source = next(iter(config["file_mounts"].items()))
    assert (ROOT / source / "raypipe/__init__.py").is_file()
    assert config["setup_commands"][0].endswith(f"--editable {mounted}")
    assert all((ROOT / name).is_file() for name in config["rsync_filter"])
    options = " ".join(config["docker"]["run_options"])
    ((on_host, cache),) = re.findall(r"-v (\S+):(\S+)", options)
    assert f"mkdir -p {on_host}" in config["initialization_commands"]
    assert cache in (DEPLOY / "Dockerfile").read_text()
    (notice,) = config["worker_start_ray_commands"][2:]
    program = Path(notice.split()[3])
    assert (ROOT / program.relative_to(mounted)).is_file()
    assert "--dashboard-host=127.0.0.1" in config["head_start_ray_commands"][1]


def container_environment(config: dict[str, Any]) -> dict[str, str]:
    """What `docker run` is told to set by the options of a cluster's file."""
    words = shlex.split(" ".join(config["docker"]["run_options"]))
    return dict(
        value.split("=", 1)
        for flag, value in itertools.pairwise(words)
        if flag in ("--env", "-e")
    )


def test_neither_head_nor_node_starts_without_the_token(tmp_path: Path) -> None:
    config = load(RAY_UP[0])
    ours = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_")
    }
    of_container = container_environment(config)
    assert of_container["RAY_AUTH_MODE"] == "token", "these would start, and stay"
    for command in (
        config["head_start_ray_commands"][1],
        config["worker_start_ray_commands"][1],
    ):
        words = shlex.split(command.replace("$RAY_HEAD_IP:6379", "127.0.0.1:9"))
        words[0] = str(Path(sys.executable).parent / "ray")
        done = subprocess.run(
            words,
            env={**ours, **of_container, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode and "no authentication token was found" in done.stderr
    assert not (tmp_path / ".ray").exists(), "a token that no other node has"


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An AWS account as deploy/aws-account.sh leaves it; gives its EC2 client."""
    # Ray asks for all types of machine, of which moto has a thousand: seconds, for nothing.
    groups = [
        group for path in AWS for group in load(path)["available_node_types"].values()
    ]
    asked = {group["node_config"]["InstanceType"] for group in groups}
    known = [each for each in InstanceTypeBackend.instance_types if each.name in asked]
    region = load(ROOT / "cluster.yaml")["provider"]["region"]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "of-nobody")
        for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_DEFAULT_REGION", region)
        patch.setattr(InstanceTypeBackend, "instance_types", known)
        folder = tmp_path_factory.mktemp("aws")  # where the command `aws` is
        patch.setenv("PATH", str(folder), prepend=os.pathsep)
        script = ["bash", DEPLOY / "aws-account.sh", "my-bucket", "203.0.113.7/32"]
        with moto.mock_aws(), AwsCli(folder):
            subprocess.run(script, stdout=subprocess.DEVNULL, check=True)
            yield boto3.client("ec2")


def allows(role: str, action: str, resource: str, **context: str) -> bool:
    """Whether a role's policy allows an action, as IAM evaluates what aws-account.sh uses of its language."""
    iam = boto3.client("iam")
    policy: Any = iam.get_role_policy(RoleName=role, PolicyName="raypipe")

    def matches(patterns: str | list[str], name: str) -> bool:
        given = [patterns] if isinstance(patterns, str) else patterns
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in given)

    for statement in policy["PolicyDocument"]["Statement"]:
        if "Resource" in statement:
            is_meant = matches(statement["Resource"], resource)
        else:
            is_meant = not matches(statement["NotResource"], resource)
        conditions = statement.get("Condition", {}).get("StringEquals", {})
        asked = {
            name.replace(":", "_").replace("/ray-cluster-name", ""): value
            for name, value in conditions.items()
        }
        is_action = matches(statement["Action"], action)
        if is_meant and is_action and asked.items() <= context.items():
            return True
    return False


def test_ray_up_starts_a_node_of_each_kind_on_a_pretended_aws(aws: Any) -> None:
    config = AWSNodeProvider.fillout_available_node_types_resources(
        prepare_config(load(ROOT / "cluster.yaml"))
    )
    assert limits_of(config)["CPU"] == 16 * 32 + 2 * 28
    config["auth"]["ssh_private_key"] = "of-nobody"
    for group in config["available_node_types"].values():
        group["node_config"]["KeyName"] = "of-nobody"
    config = bootstrap_aws(config)
    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    for name, group in config["available_node_types"].items():
        tags = {"ray-node-type": "worker", "ray-user-node-type": name}
        provider.create_node(group["node_config"], tags, 1)
    started = [
        node
        for part in aws.describe_instances()["Reservations"]
        for node in part["Instances"]
    ]
    roles = [node["IamInstanceProfile"]["Arn"].rpartition("/")[2] for node in started]
    assert roles == ["raypipe-head", *["raypipe-node"] * 4]
    spot = [node.get("InstanceLifecycle") == "spot" for node in started]
    assert spot == [False, True, True, True, False]
    for node in started:
        # The head may start and end just such machines.
        tags = {tag["Key"]: tag["Value"] for tag in node["Tags"]}
        name = tags["ray-cluster-name"]
        token = node["MetadataOptions"]["HttpTokens"]
        machine = f"{EC2}:instance/{node['InstanceId']}"
        new = {"aws_RequestTag": name, "ec2_MetadataHttpTokens": token}
        assert allows("raypipe-head", "ec2:RunInstances", machine, **new)
        its = {"aws_ResourceTag": name}
        assert allows("raypipe-head", "ec2:TerminateInstances", machine, **its)
    (group,) = aws.describe_security_groups(GroupNames=["raypipe"])["SecurityGroups"]
    rules = json.dumps(group["IpPermissions"])
    assert "0.0.0.0/0" not in rules, "Ray has let in everybody"


@pytest.mark.usefixtures("aws")
def test_the_head_may_touch_no_machines_but_the_clusters_and_nodes_none() -> None:
    machine = f"{EC2}:instance/i-1"
    ours = {"aws_ResourceTag": "raypipe"}
    others = {"aws_ResourceTag": "production"}
    new = {"aws_RequestTag": "raypipe", "ec2_MetadataHttpTokens": "required"}
    for action in ("ec2:TerminateInstances", "ec2:CreateTags"):
        assert allows("raypipe-head", action, machine, **ours)
        assert not allows("raypipe-head", action, machine, **others)
        assert not allows("raypipe-node", action, machine, **ours)
    start = "ec2:RunInstances"
    assert not allows("raypipe-node", start, machine, **new)
    for wrong in ({"aws_RequestTag": "other"}, {"ec2_MetadataHttpTokens": "optional"}):
        assert not allows("raypipe-head", start, machine, **new | wrong)
    # a tag of a machine that is there
    assert not allows("raypipe-head", "ec2:CreateTags", machine, aws_RequestTag="x")
    to_machines = {"iam_PassedToService": "ec2.amazonaws.com"}
    for role, may in (("node", True), ("head", False)):
        arn = f"arn:aws:iam::123456789012:role/raypipe-{role}"
        assert allows("raypipe-head", "iam:PassRole", arn, **to_machines) == may


def of_google(schemas: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """JSON Schema of a part of Google's API description; unknown fields are errors."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"]]
    if "properties" in schema:
        parts = {
            name: of_google(schemas, part)
            for name, part in schema["properties"].items()
        }
        return {"type": "object", "additionalProperties": False, "properties": parts}
    if schema.get("type") == "array":
        return {"type": "array", "items": of_google(schemas, schema["items"])}
    if schema.get("format") in ("int64", "uint64"):
        return {"type": ["string", "integer"]}
    return {name: value for name, value in schema.items() if name in ("type", "enum")}


@pytest.mark.parametrize("path", GCP, ids=lambda path: path.name)
def test_google_cloud_knows_every_field_of_its_nodes(path: Path) -> None:
    api = (
        Path(googleapiclient.__file__).parent
        / "discovery_cache/documents/compute.v1.json"
    )
    schemas = json.loads(api.read_text())["schemas"]
    instance = of_google(schemas, {"$ref": "Instance"})
    config = load(path)
    for group in config["available_node_types"].values():
        jsonschema.validate(group["node_config"], instance)
        assert get_node_type(group["node_config"]) == GCPNodeType.COMPUTE
        for disk in group["node_config"]["disks"]:
            zone = disk["initializeParams"].get(
                "diskType", f"zones/{config['provider']['availability_zone']}/"
            )
            assert zone.startswith(f"zones/{config['provider']['availability_zone']}/")
    groups = config["available_node_types"]
    assert groups["cpu"]["node_config"]["scheduling"]["provisioningModel"] == "SPOT"
    gpus = groups["gpu"]["node_config"]["guestAccelerators"][0]["acceleratorCount"]
    assert gpus == groups["gpu"]["resources"]["GPU"]
    with pytest.raises(jsonschema.ValidationError, match="machineTyp"):
        jsonschema.validate({"machineTyp": "n2-standard-8"}, instance)


# KubeRay


def groups_of(kuberay: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    spec = kuberay["RayCluster"]["spec"]
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def test_the_manifests_fit_the_kept_model_of_kuberay(
    kuberay: dict[str, dict[str, Any]],
) -> None:
    model = jsonschema.Draft202012Validator(
        load(ROOT / "tests/deploy/kuberay_model.yaml")
    )
    model.validate(kuberay["RayCluster"])
    changed = copy.deepcopy(kuberay["RayCluster"])
    changed["spec"]["workerGroupSpecs"][0]["minReplica"] = 1
    assert not model.is_valid(changed)


def test_kubernetes_knows_every_field_of_the_pods(
    kuberay: dict[str, dict[str, Any]],
) -> None:
    version = kubernetes_validate.latest_version()
    for group in groups_of(kuberay):
        spec = group["template"]["spec"]
        metadata = {"name": "pod", **group["template"].get("metadata", {})}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        kubernetes_validate.validate(pod, version, strict=True)
        (container,) = spec["containers"]
        volumes = {volume["name"]: volume["emptyDir"] for volume in spec["volumes"]}
        mounts = {
            mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]
        }
        assert mounts == {"shm": "/dev/shm", "cache": "/home/ray/cache"}
        variables = {each["name"]: each.get("value") for each in container["env"]}
        room = int(volumes["cache"]["sizeLimit"].removesuffix("Gi")) << 30
        cache_bytes = int(variables["RAYPIPE_CACHE_BYTES"])
        assert cache_bytes < room, "the pod would be evicted"
        resources = container["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]


def test_rays_autoscaler_reads_the_cluster_from_kubernetes(
    kuberay: dict[str, dict[str, Any]],
) -> None:
    cluster = copy.deepcopy(kuberay["RayCluster"])
    cluster["metadata"]["namespace"] = "default"  # as the API server answers
    config = _derive_autoscaling_config_from_ray_cr(cluster)  # validates it, too
    groups = config["available_node_types"]
    assert groups["cpu"]["labels"] == LABEL and not groups["gpu"]["labels"]
    assert limits_of(config)["CPU"] == 16 * 30 + 2 * 28
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    # node_limits asks by it
    assert "RAY_CLUSTER_NAME" in {each["name"] for each in head["env"]}


def test_pods_of_a_run_are_not_moved_and_workers_are_drained_first(
    kuberay: dict[str, dict[str, Any]],
) -> None:
    version = kubernetes_validate.latest_version()
    head, cpu, gpu = (group["template"] for group in groups_of(kuberay))
    for stays in (head, gpu, kuberay["Job"]["spec"]["template"]):
        assert stays["metadata"]["annotations"] == {
            "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
            "karpenter.sh/do-not-disrupt": "true",
        }
    assert "metadata" not in cpu, "an idle CPU node is given back"
    for worker in (cpu, gpu):
        (container,) = worker["spec"]["containers"]
        command = container["lifecycle"]["preStop"]["exec"]["command"]
        assert (ROOT / Path(command[1]).relative_to("/opt/raypipe")).is_file()
        assert int(command[-1]) < worker["spec"]["terminationGracePeriodSeconds"]
    for name in ("head", "gpu"):
        kubernetes_validate.validate(kuberay[f"raypipe-{name}"], version, strict=True)


def test_the_job_starts_the_run_or_goes_on_with_it_by_a_file_of_the_image(
    kuberay: dict[str, dict[str, Any]],
) -> None:
    job = kuberay["Job"]
    named = {**job, "metadata": {**job["metadata"], "name": "job"}}
    version = kubernetes_validate.latest_version()
    kubernetes_validate.validate(named, version, strict=True)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert job["spec"]["backoffLimit"] > 0 and "--resume=auto" in container["args"]
    address, name = container["command"][2:]
    cluster = kuberay["RayCluster"]["metadata"]["name"]
    assert address == f"http://{cluster}-head-svc:8265"
    assert f"--name={name}" in container["args"]
    for program in (container["command"][1], container["args"][1]):
        assert (ROOT / Path(program).relative_to("/opt/raypipe")).is_file()
    later = {"operator": "In", "values": [os.EX_TEMPFAIL]}
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert {"action": "Ignore", "onExitCodes": later} in rules


# The image


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, in order: (name, arguments), comments and line breaks removed."""
    lines = [
        line
        for line in dockerfile.splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (name, arguments.strip())
        for name, _, arguments in (line.partition(" ") for line in joined.splitlines())
    ]


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "hadolint", "--no-color", DEPLOY / "Dockerfile"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_pinned_and_copies_what_there_is() -> None:
    steps = instructions((DEPLOY / "Dockerfile").read_text())
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", dict(steps)["FROM"])
    copied = [
        word
        for name, arguments in steps
        if name == "COPY"
        for word in shlex.split(arguments)[:-1]
        if not word.startswith("--")
    ]
    assert {"pyproject.toml", "hatch_build.py", "raypipe"} < set(copied)
    assert all((ROOT / source).exists() for source in copied)
    for name, arguments in steps:
        if name == "RUN" and "pip install" in arguments:
            for part in arguments.split("&&"):
                assert "constraints.txt" in part or "--no-deps" in part
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in dict(steps)["ENV"]
    assert [arguments for name, arguments in steps if name == "USER"][-1] == "1000"


def test_the_image_ray_and_the_manifests_agree_on_versions(
    kuberay: dict[str, dict[str, Any]],
) -> None:
    pins = (DEPLOY / "constraints.txt").read_text().splitlines()  # tests/test_pins.py
    assert f"ray=={kuberay['RayCluster']['spec']['rayVersion']}" in pins
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    image = f"raypipe:{version}"
    assert {load(path)["docker"]["image"] for path in RAY_UP} == {image}
    containers = [
        group["template"]["spec"]["containers"][0] for group in groups_of(kuberay)
    ]
    assert {container["image"] for container in containers} == {image}
