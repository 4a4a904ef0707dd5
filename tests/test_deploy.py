"""The files that put raypipe on a cluster, held against those who read them.

No cloud answers here. Ray's own code takes cluster.yaml through all that `ray up` does before it waits for a
machine, on moto's AWS; Google's description of its API, Kubernetes' schemas, a kept model of KubeRay's and
hadolint judge the rest.
"""

from __future__ import annotations

import copy
import json
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
from packaging.requirements import Requirement
from packaging.version import Version
from ray.autoscaler._private.aws.config import bootstrap_aws
from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
from ray.autoscaler._private.gcp.config import get_node_type
from ray.autoscaler._private.gcp.node import GCPNodeType
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler._private.util import prepare_config, validate_config

from raypipe.config import PoolConfig
from raypipe.node_limits import limits_of

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
RAY_UP = [ROOT / "cluster.yaml", DEPLOY / "gcp.yaml"]
LABEL = dict([PoolConfig().prefer_nodes.split("=")])

sys.path.insert(0, str(ROOT / "tests/deploy"))
from dockerfile_steps import copies, instructions  # noqa: E402  isort: skip


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def offers(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """CPUs and GPUs of each kind of node."""
    groups = {name: group["resources"] for name, group in config["available_node_types"].items()}
    return {name: (resources["CPU"], resources.get("GPU", 0)) for name, resources in groups.items()}


# ray up


@pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.name)
def test_ray_accepts_the_cluster_and_its_parts_say_the_same(path: Path) -> None:
    given = load(path)
    config = prepare_config(copy.deepcopy(given))
    validate_config(config)
    groups = config["available_node_types"]
    head, cpu, gpu = groups["head"], groups["cpu"], groups["gpu"]
    assert head["resources"] == {"CPU": 0} and head["max_workers"] == 0
    assert cpu["min_workers"] == gpu["min_workers"] == 0
    assert config["max_workers"] == cpu["max_workers"] + gpu["max_workers"]
    assert cpu["labels"] == LABEL and not gpu.get("labels") and not head.get("labels")
    assert gpu["resources"]["GPU"] < gpu["resources"]["CPU"], "trainers, and a share for transforms"
    # Nothing of Ray's defaults, which install a nightly Ray, comes with it.
    for name in ("setup_commands", "initialization_commands", "head_start_ray_commands", "docker"):
        assert config[name] == given[name]
    assert config["head_setup_commands"] == config["worker_setup_commands"] == given["setup_commands"]


@pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.name)
def test_what_ray_up_copies_runs_and_mounts_is_there(path: Path) -> None:
    config = load(path)
    (mounted, source), *others = config["file_mounts"].items()
    assert not others and (ROOT / source / "raypipe/__init__.py").is_file()
    assert config["setup_commands"][0].endswith(f"--no-build-isolation --editable {mounted}")
    assert (ROOT / config["rsync_filter"][0]).is_file()
    (cache,) = re.findall(r"-v (\S+):(\S+)", " ".join(config["docker"]["run_options"]))
    assert f"mkdir -p {cache[0]}" in config["initialization_commands"]
    assert cache[1] in (DEPLOY / "Dockerfile").read_text()
    for command in config["head_start_ray_commands"] + config["worker_start_ray_commands"]:
        assert shlex.split(command)[0] == "ray"
    assert "--dashboard-host=127.0.0.1" in config["head_start_ray_commands"][1]


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An AWS account as deploy/aws-account.sh leaves it; gives its EC2 client."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "of-nobody")
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    config = load(ROOT / "cluster.yaml")
    monkeypatch.setenv("AWS_DEFAULT_REGION", config["provider"]["region"])
    # Ray asks for all types of machine, of which moto has a thousand: seconds, for nothing.
    asked = {group["node_config"]["InstanceType"] for group in config["available_node_types"].values()}
    known = [each for each in InstanceTypeBackend.instance_types if each.name in asked]
    monkeypatch.setattr(InstanceTypeBackend, "instance_types", known)
    with moto.mock_aws():
        iam, ec2 = boto3.client("iam"), boto3.client("ec2")
        for role in ("raypipe-head", "raypipe-node"):
            iam.create_instance_profile(InstanceProfileName=role)
        vpc = ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
        group = ec2.create_security_group(GroupName="raypipe", Description="closed", VpcId=vpc)["GroupId"]
        for rule in (
            {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]},
            {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "203.0.113.7/32"}]},
        ):
            ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])
        yield ec2


def test_ray_up_starts_a_node_of_each_kind_on_a_pretended_aws(aws: Any) -> None:
    config = AWSNodeProvider.fillout_available_node_types_resources(prepare_config(load(ROOT / "cluster.yaml")))
    validate_config(config)
    config["auth"]["ssh_private_key"] = "of-nobody"
    for group in config["available_node_types"].values():
        group["node_config"]["KeyName"] = "of-nobody"
    config = bootstrap_aws(config)
    groups = config["available_node_types"]
    assert offers(config) == {"head": (0, 0), "cpu": (32, 0), "gpu": (28, 4)}
    assert {name: most for name, most in limits_of(config).items() if name in ("CPU", "GPU")} == {
        "CPU": 16 * 32 + 2 * 28,
        "GPU": 8,
    }
    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    for name, group in groups.items():
        tags = {"ray-node-type": "worker", "ray-user-node-type": name}
        provider.create_node(group["node_config"], tags, 1)
    started = [node for part in aws.describe_instances()["Reservations"] for node in part["Instances"]]
    roles = [node["IamInstanceProfile"]["Arn"].rpartition("/")[2] for node in started]
    assert roles == ["raypipe-head", "raypipe-node", "raypipe-node"]
    assert [node.get("InstanceLifecycle") for node in started] == [None, "spot", None]
    assert all([group["GroupName"] for group in node["SecurityGroups"]] == ["raypipe"] for node in started)
    (rules,) = (g["IpPermissions"] for g in aws.describe_security_groups(GroupNames=["raypipe"])["SecurityGroups"])
    assert "0.0.0.0/0" not in json.dumps(rules), "Ray has let in everybody"


def test_the_account_script_names_what_the_cluster_asks_for() -> None:
    script = (DEPLOY / "aws-account.sh").read_text()
    subprocess.run(["bash", "-n", DEPLOY / "aws-account.sh"], check=True)
    config = load(ROOT / "cluster.yaml")
    nodes = [group["node_config"] for group in config["available_node_types"].values()]
    assert f"--group-name {config['provider']['security_group']['GroupName']} " in script
    roles = set(re.findall(r"^role (\S+)", script, re.MULTILINE))
    assert roles == {node["IamInstanceProfile"]["Name"] for node in nodes}


def of_google(schemas: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """JSON Schema of a part of Google's API description; unknown fields are errors."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"]]
    if "properties" in schema:
        parts = {name: of_google(schemas, part) for name, part in schema["properties"].items()}
        return {"type": "object", "additionalProperties": False, "properties": parts}
    if schema.get("type") == "array":
        return {"type": "array", "items": of_google(schemas, schema["items"])}
    if schema.get("format") in ("int64", "uint64"):
        return {"type": ["string", "integer"]}
    return {name: value for name, value in schema.items() if name in ("type", "enum")}


def test_google_cloud_knows_every_field_of_its_nodes() -> None:
    api = Path(googleapiclient.__file__).parent / "discovery_cache/documents/compute.v1.json"
    schemas = json.loads(api.read_text())["schemas"]
    instance = of_google(schemas, {"$ref": "Instance"})
    config = load(DEPLOY / "gcp.yaml")
    for group in config["available_node_types"].values():
        jsonschema.validate(group["node_config"], instance)
        assert get_node_type(group["node_config"]) == GCPNodeType.COMPUTE
        for disk in group["node_config"]["disks"]:
            zone = disk["initializeParams"].get("diskType", f"zones/{config['provider']['availability_zone']}/")
            assert zone.startswith(f"zones/{config['provider']['availability_zone']}/")
    groups = config["available_node_types"]
    assert groups["cpu"]["node_config"]["scheduling"]["provisioningModel"] == "SPOT"
    gpus = groups["gpu"]["node_config"]["guestAccelerators"][0]["acceleratorCount"]
    assert gpus == groups["gpu"]["resources"]["GPU"]
    with pytest.raises(jsonschema.ValidationError, match="machineTyp"):
        jsonschema.validate({"machineTyp": "n2-standard-8"}, instance)


def test_both_clouds_get_the_same_cluster() -> None:
    aws, gcp = map(load, RAY_UP)
    for name in set(aws) - {"provider", "available_node_types", "initialization_commands"}:
        assert aws[name] == gcp[name], name


# KubeRay


@pytest.fixture(scope="module")
def kuberay() -> dict[str, dict[str, Any]]:
    return {part["kind"]: part for part in yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())}


def groups_of(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]


def test_the_manifests_fit_the_kept_model_of_kuberay(kuberay: dict[str, dict[str, Any]]) -> None:
    model = jsonschema.Draft202012Validator(load(ROOT / "tests/deploy/kuberay_model.yaml"))
    assert set(kuberay) == {"RayCluster", "RayJob"}
    for part in kuberay.values():
        model.validate(part)
    for wrong in ("minReplica", "idleTimeout"):
        changed = copy.deepcopy(kuberay["RayCluster"])
        changed["spec"]["workerGroupSpecs"][0][wrong] = 1
        assert not model.is_valid(changed)
    changed = copy.deepcopy(kuberay["RayCluster"])
    changed["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0  # a number is what the operator refuses
    assert not model.is_valid(changed)


def test_kubernetes_knows_every_field_of_the_pods(kuberay: dict[str, dict[str, Any]]) -> None:
    version = kubernetes_validate.latest_version()
    for group in groups_of(kuberay["RayCluster"]):
        spec = group["template"]["spec"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        kubernetes_validate.validate(pod, version, strict=True)
        (container,) = spec["containers"]
        volumes = {volume["name"]: volume["emptyDir"] for volume in spec["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"shm": "/dev/shm", "cache": "/home/ray/cache"} and set(mounts) == set(volumes)
        cache_bytes = next(
            int(each["value"]) for each in container["env"] if each["name"] == "RAYPIPE_CACHE_BYTES"
        )
        assert cache_bytes < int(volumes["cache"]["sizeLimit"].removesuffix("Gi")) << 30, (
            "the pod would be evicted"
        )
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**pod, "spec": {**spec, "toleration": []}}, version, strict=True)


def test_rays_autoscaler_reads_the_cluster_from_kubernetes(kuberay: dict[str, dict[str, Any]]) -> None:
    cluster = copy.deepcopy(kuberay["RayCluster"])
    cluster["metadata"]["namespace"] = "default"  # as the API server answers
    config = _derive_autoscaling_config_from_ray_cr(cluster)  # validates it, too
    groups = config["available_node_types"]
    assert offers(config) == {"headgroup": (0, 0), "cpu": (30, 0), "gpu": (28, 4)}
    assert groups["cpu"]["labels"] == LABEL and not groups["gpu"]["labels"]
    assert config["idle_timeout_minutes"] == load(ROOT / "cluster.yaml")["idle_timeout_minutes"]
    assert limits_of(config)["CPU"] == 16 * 30 + 2 * 28
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    name = next(each for each in head["env"] if each["name"] == "RAY_CLUSTER_NAME")  # node_limits asks by it
    assert name["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['ray.io/cluster']"


def test_the_job_runs_a_file_of_the_image_on_the_cluster(kuberay: dict[str, dict[str, Any]]) -> None:
    job = kuberay["RayJob"]["spec"]
    assert job["clusterSelector"] == {"ray.io/cluster": kuberay["RayCluster"]["metadata"]["name"]}
    program = Path(shlex.split(job["entrypoint"])[1])
    assert (ROOT / program.relative_to("/opt/raypipe")).is_file()


# The image


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "hadolint", "--no-color", DEPLOY / "Dockerfile"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_pinned_and_copies_what_there_is() -> None:
    steps = instructions((DEPLOY / "Dockerfile").read_text())
    base = steps[0][1]
    assert steps[0][0] == "FROM" and re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", base)
    for name, arguments in steps:
        if name == "COPY":
            for source in copies(arguments)[0]:
                assert (ROOT / source).exists(), source
        if (
            name == "RUN"
            and " install " in arguments
            and "apt-get" not in arguments
            and "useradd" not in arguments
        ):
            assert all("constraints.txt" in part or "--no-deps" in part for part in arguments.split("&&"))
    assert "HOME=/home/ray " in dict(steps)["ENV"] and "RAYPIPE_CACHE=/home/ray/cache " in dict(steps)["ENV"]
    last_user = [arguments for name, arguments in steps if name == "USER"][-1]
    assert last_user == "1000"


def constraints() -> dict[str, Version]:
    lines = (DEPLOY / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name: Version(version) for name, version in pins}


def test_every_pin_is_within_the_projects_ranges() -> None:
    pins = constraints()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["launch"]
    asked += project["build-system"]["requires"] + project["tool"]["uv"]["constraint-dependencies"]
    for requirement in map(Requirement, asked):
        assert requirement.name in pins and pins[requirement.name] in requirement.specifier, requirement


def test_the_image_ray_and_the_manifests_agree_on_versions(kuberay: dict[str, dict[str, Any]]) -> None:
    assert kuberay["RayCluster"]["spec"]["rayVersion"] == str(constraints()["ray"])
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    image = f"raypipe:{version}"
    assert {load(path)["docker"]["image"] for path in RAY_UP} == {image}
    containers = [group["template"]["spec"]["containers"][0] for group in groups_of(kuberay["RayCluster"])]
    assert {container["image"] for container in containers} == {image}
