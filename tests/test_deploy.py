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
BOUNDS = ("requests", "limits")
LABEL = {placement.LABEL_KEY: placement.LABEL_VALUE}

sys.path.insert(0, str(ROOT / "tests/deploy"))
from aws_cli import AwsCli  # noqa: E402  isort: skip


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def offers(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """CPUs and GPUs of each kind of node."""
    groups = {
        name: group["resources"]
        for name, group in config["available_node_types"].items()
    }
    return {
        name: (resources["CPU"], resources.get("GPU", 0))
        for name, resources in groups.items()
    }


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
    head, cpu, gpu = groups["head"], groups["cpu"], groups["gpu"]
    others = [group for name, group in groups.items() if name.startswith("cpu-")]
    assert others, "spot machines of one type alone"
    for other in others:
        assert {**other, "node_config": 0, "max_workers": 0} == {
            **cpu,
            "node_config": 0,
            "max_workers": 0,
        }
        changed = {
            name
            for name, value in other["node_config"].items()
            if value != cpu["node_config"][name]
        }
        assert changed == {"InstanceType"} or changed == {"machineType"}
    assert head["resources"] == {"CPU": 0} and head["max_workers"] == 0
    assert cpu["min_workers"] == gpu["min_workers"] == 0
    # Whatever CPU nodes there are, a lost GPU node can be replaced.
    assert config["max_workers"] == sum(
        group["max_workers"] for group in groups.values()
    )
    assert cpu["max_workers"] + sum(other["max_workers"] for other in others) == 16
    assert gpu["max_workers"] == (1 if path.name == "gcp-a3.yaml" else 2)
    assert cpu["labels"] == LABEL and not gpu.get("labels") and not head.get("labels")
    assert gpu["resources"]["GPU"] < gpu["resources"]["CPU"], (
        "trainers, and a share for transforms"
    )
    # Nothing of Ray's defaults, which install a nightly Ray, comes with it.
    for name in (
        "setup_commands",
        "initialization_commands",
        "head_start_ray_commands",
        "docker",
    ):
        assert config[name] == given[name]
    assert (
        config["head_setup_commands"]
        == config["worker_setup_commands"]
        == given["setup_commands"]
    )


@pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.name)
def test_what_ray_up_copies_runs_and_mounts_is_there(path: Path) -> None:
    config = load(path)
    (mounted, source), (token, own_token) = config["file_mounts"].items()
    assert token.startswith("/home/ray/") and token.endswith(
        own_token.removeprefix("~/")
    )
    assert (ROOT / source / "raypipe/__init__.py").is_file()
    assert config["setup_commands"][0].endswith(
        f"--no-build-isolation --editable {mounted}"
    )
    assert config["rsync_filter"] == [".gitignore", ".rayignore"]
    assert all((ROOT / name).is_file() for name in config["rsync_filter"])
    (cache,) = re.findall(r"-v (\S+):(\S+)", " ".join(config["docker"]["run_options"]))
    assert f"mkdir -p {cache[0]}" in config["initialization_commands"]
    assert cache[1] in (DEPLOY / "Dockerfile").read_text()
    for command in (
        config["head_start_ray_commands"] + config["worker_start_ray_commands"][:2]
    ):
        assert shlex.split(command)[0] == "ray"
    (notice,) = config["worker_start_ray_commands"][2:]
    program = Path(notice.split()[3])
    assert shlex.split(notice)[:3] == ["setsid", "nohup", "python"] and notice.endswith(
        " < /dev/null &"
    )
    assert (ROOT / program.relative_to(mounted)).is_file()
    assert "--dashboard-host=127.0.0.1" in config["head_start_ray_commands"][1]


def container_environment(config: dict[str, Any], *options: str) -> dict[str, str]:
    """What `docker run` is told to set by the options of a cluster's file."""
    words = shlex.split(
        " ".join(option for name in options for option in config["docker"][name])
    )
    return dict(
        value.split("=", 1)
        for flag, value in itertools.pairwise(words)
        if flag in ("--env", "-e")
    )


@pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.name)
def test_neither_head_nor_node_starts_without_the_token(
    path: Path, tmp_path: Path
) -> None:
    config = load(path)
    ours = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_")
    }
    environment = {
        **ours,
        **container_environment(config, "run_options"),
        "HOME": str(tmp_path),
    }
    assert environment.get("RAY_AUTH_MODE") == "token", "these would start, and stay"
    for command in (
        config["head_start_ray_commands"][1],
        config["worker_start_ray_commands"][1],
    ):
        words = shlex.split(command.replace("$RAY_HEAD_IP:6379", "127.0.0.1:9"))
        words[0] = str(Path(sys.executable).parent / "ray")
        done = subprocess.run(
            words,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode and "no authentication token was found" in done.stderr, (
            done.stderr[-2000:]
        )
    assert not (tmp_path / ".ray").exists(), "a token that no other node has"


def test_every_cluster_calls_a_dead_node_dead_at_the_same_time(
    kuberay: dict[str, dict[str, Any]],
) -> None:
    head = kuberay["RayCluster"]["spec"]["headGroupSpec"]["template"]["spec"][
        "containers"
    ][0]
    clusters = [
        container_environment(load(path), "head_run_options") for path in RAY_UP
    ]
    clusters += [{each["name"]: each.get("value", "") for each in head["env"]}]
    for cluster in clusters:
        found = {
            name: value
            for name, value in cluster.items()
            if name.startswith("RAY_health_check_")
        }
        assert found == {
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "1000",
            "RAY_health_check_failure_threshold": "5",
        }


def account(folder: Path, cidr: str) -> str:
    """What deploy/aws-account.sh prints."""
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    script = ["bash", DEPLOY / "aws-account.sh", "my-bucket", cidr]
    done = subprocess.run(
        script, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """An AWS account as deploy/aws-account.sh leaves it; gives its EC2 client."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "of-nobody")
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(
        "AWS_DEFAULT_REGION", load(ROOT / "cluster.yaml")["provider"]["region"]
    )
    # Ray asks for all types of machine, of which moto has a thousand: seconds, for nothing.
    groups = [
        group for path in AWS for group in load(path)["available_node_types"].values()
    ]
    asked = {group["node_config"]["InstanceType"] for group in groups}
    known = [each for each in InstanceTypeBackend.instance_types if each.name in asked]
    monkeypatch.setattr(InstanceTypeBackend, "instance_types", known)
    with moto.mock_aws(), AwsCli(tmp_path):
        account(tmp_path, "203.0.113.7/32")
        yield boto3.client("ec2")


def allows(role: str, action: str, resource: str, **context: str) -> bool:
    """Whether a role's policy allows an action, as IAM evaluates what aws-account.sh uses of its language."""
    policy = boto3.client("iam").get_role_policy(RoleName=role, PolicyName="raypipe")[
        "PolicyDocument"
    ]

    def matches(patterns: str | list[str], name: str) -> bool:
        given = [patterns] if isinstance(patterns, str) else patterns
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in given)

    for statement in policy["Statement"]:  # type: ignore[index]
        assert statement["Effect"] == "Allow" and set(
            statement.get("Condition", {})
        ) <= {"StringEquals"}
        at = (
            matches(statement["Resource"], resource)
            if "Resource" in statement
            else None
        )
        at = not matches(statement["NotResource"], resource) if at is None else at
        asked = {
            name.replace(":", "_").replace("/ray-cluster-name", ""): value
            for name, value in statement.get("Condition", {})
            .get("StringEquals", {})
            .items()
        }
        if (
            at
            and matches(statement["Action"], action)
            and asked.items() <= context.items()
        ):
            return True
    return False


def test_ray_up_starts_a_node_of_each_kind_on_a_pretended_aws(aws: Any) -> None:
    config = AWSNodeProvider.fillout_available_node_types_resources(
        prepare_config(load(ROOT / "cluster.yaml"))
    )
    validate_config(config)
    config["auth"]["ssh_private_key"] = "of-nobody"
    for group in config["available_node_types"].values():
        group["node_config"]["KeyName"] = "of-nobody"
    config = bootstrap_aws(config)
    groups = config["available_node_types"]
    assert offers(config) == {
        "head": (0, 0),
        **dict.fromkeys(("cpu", "cpu-m6i", "cpu-r6i"), (32, 0)),
        "gpu": (28, 4),
    }
    assert {
        name: most for name, most in limits_of(config).items() if name in ("CPU", "GPU")
    } == {
        "CPU": 16 * 32 + 2 * 28,
        "GPU": 8,
    }
    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    for name, group in groups.items():
        tags = {"ray-node-type": "worker", "ray-user-node-type": name}
        provider.create_node(group["node_config"], tags, 1)
    started = [
        node
        for part in aws.describe_instances()["Reservations"]
        for node in part["Instances"]
    ]
    roles = [node["IamInstanceProfile"]["Arn"].rpartition("/")[2] for node in started]
    assert roles == ["raypipe-head", *["raypipe-node"] * 4]
    assert [node.get("InstanceLifecycle") for node in started] == [
        None,
        "spot",
        "spot",
        "spot",
        None,
    ]
    for node in started:
        metadata, tags = (
            node["MetadataOptions"],
            {tag["Key"]: tag["Value"] for tag in node["Tags"]},
        )
        assert (metadata["HttpTokens"], metadata["HttpPutResponseHopLimit"]) == (
            "required",
            2,
        )
        # The head may start and end just such machines.
        name, arn = (
            tags["ray-cluster-name"],
            f"arn:aws:ec2:us-west-2:123456789012:instance/{node['InstanceId']}",
        )
        new = {"aws_RequestTag": name, "ec2_MetadataHttpTokens": metadata["HttpTokens"]}
        assert allows("raypipe-head", "ec2:RunInstances", arn, **new)
        assert allows(
            "raypipe-head", "ec2:TerminateInstances", arn, aws_ResourceTag=name
        )
    assert all(
        [group["GroupName"] for group in node["SecurityGroups"]] == ["raypipe"]
        for node in started
    )
    (rules,) = (
        g["IpPermissions"]
        for g in aws.describe_security_groups(GroupNames=["raypipe"])["SecurityGroups"]
    )
    assert "0.0.0.0/0" not in json.dumps(rules), "Ray has let in everybody"


def test_the_head_may_touch_no_machines_but_the_clusters_and_nodes_none(
    aws: Any,
) -> None:
    machine, tag = "arn:aws:ec2:us-west-2:123456789012:instance/i-1", "raypipe"
    for action in ("ec2:TerminateInstances", "ec2:CreateTags"):
        assert allows("raypipe-head", action, machine, aws_ResourceTag=tag)
        assert not allows("raypipe-head", action, machine, aws_ResourceTag="production")
        assert not allows("raypipe-head", action, machine)
    start = {"aws_RequestTag": tag, "ec2_MetadataHttpTokens": "required"}
    assert not allows(
        "raypipe-head",
        "ec2:RunInstances",
        machine,
        **{**start, "aws_RequestTag": "production"},
    )
    assert not allows(
        "raypipe-head",
        "ec2:RunInstances",
        machine,
        **{**start, "ec2_MetadataHttpTokens": "optional"},
    )
    assert allows(
        "raypipe-head",
        "ec2:CreateTags",
        machine,
        aws_RequestTag=tag,
        ec2_CreateAction="RunInstances",
    )
    # of a machine that is there
    assert not allows("raypipe-head", "ec2:CreateTags", machine, aws_RequestTag=tag)
    for part in (
        "image/ami-1",
        "subnet/s",
        "security-group/g",
        "volume/*",
        "network-interface/*",
    ):
        assert allows(
            "raypipe-head",
            "ec2:RunInstances",
            f"arn:aws:ec2:us-west-2:123456789012:{part}",
        )
    node, head = (
        f"arn:aws:iam::123456789012:role/raypipe-{name}" for name in ("node", "head")
    )
    assert allows(
        "raypipe-head", "iam:PassRole", node, iam_PassedToService="ec2.amazonaws.com"
    )
    assert not allows(
        "raypipe-head", "iam:PassRole", head, iam_PassedToService="ec2.amazonaws.com"
    )
    for action in (
        "ec2:RunInstances",
        "ec2:TerminateInstances",
        "ec2:CreateTags",
        "iam:PassRole",
    ):
        assert not allows("raypipe-node", action, machine, aws_ResourceTag=tag, **start)


def test_the_account_script_may_run_again_and_moves_ssh_to_this_network(
    aws: Any, tmp_path: Path
) -> None:
    def state() -> tuple[Any, ...]:
        iam = boto3.client("iam")
        (group,) = aws.describe_security_groups(GroupNames=["raypipe"])[
            "SecurityGroups"
        ]
        profiles = iam.list_instance_profiles()["InstanceProfiles"]
        networks = [
            network["CidrIp"]
            for rule in group["IpPermissions"]
            for network in rule["IpRanges"]
        ]
        roles = {
            each["InstanceProfileName"]: [role["RoleName"] for role in each["Roles"]]
            for each in profiles
        }
        return group["GroupId"], networks, len(group["IpPermissions"]), roles

    group, networks, rules, roles = state()
    assert networks == ["203.0.113.7/32"] and rules == 2
    assert roles == {name: [name] for name in ("raypipe-head", "raypipe-node")}
    assert group in account(tmp_path, "203.0.113.7/32") and state() == (
        group,
        networks,
        rules,
        roles,
    )
    account(tmp_path, "198.51.100.0/24")
    assert state() == (group, ["198.51.100.0/24"], rules, roles)


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


def test_both_clouds_get_the_same_cluster() -> None:
    aws, gcp, p5, a3 = map(load, RAY_UP)
    for name in set(aws) - {
        "provider",
        "available_node_types",
        "initialization_commands",
    }:
        assert aws[name] == gcp[name], name
    for one, large in ((aws, p5), (gcp, a3)):
        groups, others = (
            {**each["available_node_types"], "gpu": None} for each in (one, large)
        )
        assert groups == others and set(one) == set(large)
        for name in set(one) - {"available_node_types", "max_workers"}:
            assert one[name] == large[name], name


# Hosts of eight GPUs


def test_a_p5_has_efa_on_each_card_and_ray_starts_it_on_a_fake_aws(aws: Any) -> None:
    config = prepare_config(load(DEPLOY / "aws-p5.yaml"))
    config["auth"]["ssh_private_key"] = "of-nobody"
    # What is marked CHANGE.
    subnet = aws.describe_subnets()["Subnets"][0]["SubnetId"]
    (group,) = aws.describe_security_groups(GroupNames=["raypipe"])["SecurityGroups"]
    nodes = {
        name: each["node_config"]
        for name, each in config["available_node_types"].items()
    }
    for interface in nodes["gpu"]["NetworkInterfaces"]:
        assert (interface["SubnetId"], interface["Groups"]) == ("subnet-0", ["sg-0"])
        interface |= {"SubnetId": subnet, "Groups": [group["GroupId"]]}
    for node in nodes.values():
        node["KeyName"] = "of-nobody"
    config = bootstrap_aws(config)
    node = config["available_node_types"]["gpu"]["node_config"]
    given = [
        (each["NetworkCardIndex"], each["DeviceIndex"], each["InterfaceType"])
        for each in node["NetworkInterfaces"]
    ]
    assert given[:2] == [(0, 0, "interface"), (0, 1, "efa-only")]
    assert given[2:] == [(card, 0, "efa-only") for card in range(1, 32)]
    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    # botocore looks at each
    provider.create_node(
        node, {"ray-node-type": "worker", "ray-user-node-type": "gpu"}, 1
    )
    (started,) = (
        node
        for part in aws.describe_instances()["Reservations"]
        for node in part["Instances"]
    )
    (kind,) = aws.describe_instance_types(InstanceTypes=[started["InstanceType"]])[
        "InstanceTypes"
    ]
    assert (
        kind["VCpuInfo"]["DefaultVCpus"] == 192
        and kind["GpuInfo"]["Gpus"][0]["Count"] == 8
    )
    assert (
        kind["NetworkInfo"]["EfaInfo"]["MaximumEfaInterfaces"]
        == kind["NetworkInfo"]["MaximumNetworkCards"]
        == 32
    )
    # EFA wants a group that lets in, and out, what is its own.
    for rules in (group["IpPermissions"], group["IpPermissionsEgress"]):
        assert [group["GroupId"]] in [
            [pair["GroupId"] for pair in rule["UserIdGroupPairs"]] for rule in rules
        ]


def test_only_hosts_that_have_efa_are_given_its_devices() -> None:
    config = load(DEPLOY / "aws-p5.yaml")
    options = {
        name: each.get("docker", {})
        for name, each in config["available_node_types"].items()
    }
    assert {name for name, each in options.items() if each} == {"gpu"}
    words = shlex.split(" ".join(options["gpu"]["worker_run_options"]))
    assert words[:4] == ["--device", "/dev/infiniband", "--ulimit", "memlock=-1:-1"]
    assert container_environment({"docker": options["gpu"]}, "worker_run_options") == {
        "NCCL_SOCKET_IFNAME": "en",
        "FI_EFA_USE_HUGE_PAGE": "0",
    }


# KubeRay


def groups_of(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]


def test_the_manifests_fit_the_kept_model_of_kuberay(
    kuberay: dict[str, dict[str, Any]],
) -> None:
    model = jsonschema.Draft202012Validator(
        load(ROOT / "tests/deploy/kuberay_model.yaml")
    )
    model.validate(kuberay["RayCluster"])
    for wrong in ("minReplica", "idleTimeout"):
        changed = copy.deepcopy(kuberay["RayCluster"])
        changed["spec"]["workerGroupSpecs"][0][wrong] = 1
        assert not model.is_valid(changed)
    changed = copy.deepcopy(kuberay["RayCluster"])
    # a number is what the operator refuses
    changed["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    assert not model.is_valid(changed)


def test_kubernetes_knows_every_field_of_the_pods(
    kuberay: dict[str, dict[str, Any]],
) -> None:
    version = kubernetes_validate.latest_version()
    for group in groups_of(kuberay["RayCluster"]):
        spec = group["template"]["spec"]
        metadata = {"name": "pod", **group["template"].get("metadata", {})}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        kubernetes_validate.validate(pod, version, strict=True)
        (container,) = spec["containers"]
        volumes = {volume["name"]: volume["emptyDir"] for volume in spec["volumes"]}
        mounts = {
            mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]
        }
        assert mounts == {"shm": "/dev/shm", "cache": "/home/ray/cache"} and set(
            mounts
        ) == set(volumes)
        cache_bytes = next(
            int(each["value"])
            for each in container["env"]
            if each["name"] == "RAYPIPE_CACHE_BYTES"
        )
        assert (
            cache_bytes < int(volumes["cache"]["sizeLimit"].removesuffix("Gi")) << 30
        ), "the pod would be evicted"
        assert (
            container["resources"]["requests"]["memory"]
            == container["resources"]["limits"]["memory"]
        )
        storage = [
            int(container["resources"][of]["ephemeral-storage"].removesuffix("Gi"))
            for of in BOUNDS
        ]
        # GKE's default disk of 100 GB leaves 47060071478 bytes to pods, says its page on plans of node sizes.
        assert (
            int(volumes["cache"]["sizeLimit"].removesuffix("Gi")) < storage[1]
            and storage[0] << 30 < 47060071478
        )
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {**pod, "spec": {**spec, "toleration": []}}, version, strict=True
        )


def test_rays_autoscaler_reads_the_cluster_from_kubernetes(
    kuberay: dict[str, dict[str, Any]],
) -> None:
    cluster = copy.deepcopy(kuberay["RayCluster"])
    cluster["metadata"]["namespace"] = "default"  # as the API server answers
    config = _derive_autoscaling_config_from_ray_cr(cluster)  # validates it, too
    groups = config["available_node_types"]
    assert offers(config) == {"headgroup": (0, 0), "cpu": (30, 0), "gpu": (28, 4)}
    assert groups["cpu"]["labels"] == LABEL and not groups["gpu"]["labels"]
    assert (
        config["idle_timeout_minutes"]
        == load(ROOT / "cluster.yaml")["idle_timeout_minutes"]
    )
    assert limits_of(config)["CPU"] == 16 * 30 + 2 * 28
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    # node_limits asks by it
    name = next(each for each in head["env"] if each["name"] == "RAY_CLUSTER_NAME")
    assert (
        name["valueFrom"]["fieldRef"]["fieldPath"]
        == "metadata.labels['ray.io/cluster']"
    )


def test_pods_of_a_run_are_not_moved_and_workers_are_drained_first(
    kuberay: dict[str, dict[str, Any]],
) -> None:
    version = kubernetes_validate.latest_version()
    cluster = kuberay["RayCluster"]
    head, cpu, gpu = (group["template"] for group in groups_of(cluster))
    for stays in (head, gpu, kuberay["Job"]["spec"]["template"]):
        assert stays["metadata"]["annotations"] == {
            "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
            "karpenter.sh/do-not-disrupt": "true",
        }
    assert "metadata" not in cpu, "an idle CPU node is given back"
    for worker in (cpu, gpu):
        command = worker["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"][
            "command"
        ]
        assert (ROOT / Path(command[1]).relative_to("/opt/raypipe")).is_file()
        assert int(command[-1]) < worker["spec"]["terminationGracePeriodSeconds"]
    pods = {"head": {"ray.io/node-type": "head"}, "gpu": {"ray.io/group": "gpu"}}
    most = {
        group["groupName"]: group["maxReplicas"]
        for group in cluster["spec"]["workerGroupSpecs"]
    } | {"head": 1}
    for name, labels in pods.items():
        budget = kuberay[f"raypipe-{name}"]
        kubernetes_validate.validate(budget, version, strict=True)
        assert budget["spec"]["minAvailable"] == most[name]
        assert budget["spec"]["selector"]["matchLabels"] == {
            "ray.io/cluster": "raypipe",
            **labels,
        }


def test_the_commented_lines_let_a_heads_state_outlive_it() -> None:
    text = (DEPLOY / "kuberay.yaml").read_text()
    lines = re.search(r"(  # gcsFaultToleranceOptions:\n(?:  #   .*\n)+)", text)
    assert lines
    turned_on = text.replace(
        lines[1], lines[1].replace("# ", "", 2).replace("  #   ", "    ")
    )
    cluster = next(yaml.safe_load_all(turned_on))
    assert set(cluster["spec"]["gcsFaultToleranceOptions"]) == {
        "redisAddress",
        "redisPassword",
    }
    jsonschema.validate(cluster, load(ROOT / "tests/deploy/kuberay_model.yaml"))


def test_the_job_starts_the_run_or_goes_on_with_it_by_a_file_of_the_image(
    kuberay: dict[str, dict[str, Any]],
) -> None:
    job, cluster = kuberay["Job"], kuberay["RayCluster"]
    named = {**job, "metadata": {**job["metadata"], "name": "job"}}
    kubernetes_validate.validate(
        named, kubernetes_validate.latest_version(), strict=True
    )
    assert (
        job["spec"]["backoffLimit"] > 0
        and "--resume=auto" in job["spec"]["template"]["spec"]["containers"][0]["args"]
    )
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert (
        container["image"]
        == cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0][
            "image"
        ]
    )
    address, name = container["command"][2:]
    assert address == f"http://{cluster['metadata']['name']}-head-svc:8265"
    assert f"--name={name}" in container["args"]
    for program in (container["command"][1], container["args"][1]):
        assert (ROOT / Path(program).relative_to("/opt/raypipe")).is_file()
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert {
        "action": "Ignore",
        "onExitCodes": {"operator": "In", "values": [os.EX_TEMPFAIL]},
    } in rules


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


def copies(arguments: str) -> tuple[list[str], str]:
    """Sources, relative to the repository, and destination of a COPY."""
    *sources, destination = [
        word for word in shlex.split(arguments) if not word.startswith("--")
    ]
    return sources, destination


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "hadolint", "--no-color", DEPLOY / "Dockerfile"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_pinned_and_copies_what_there_is() -> None:
    steps = instructions((DEPLOY / "Dockerfile").read_text())
    copied = {
        source
        for name, arguments in steps
        if name == "COPY"
        for source in copies(arguments)[0]
    }
    assert copied >= {
        "pyproject.toml",
        "hatch_build.py",
        "LICENSE",
        "NOTICE",
        "raypipe",
    }, "what a wheel needs"
    base = steps[0][1]
    assert steps[0][0] == "FROM" and re.fullmatch(
        r"python:\d+\.\d+\.\d+-slim-\w+", base
    )
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
            assert all(
                "constraints.txt" in part or "--no-deps" in part
                for part in arguments.split("&&")
            )
    capabilities = re.findall(r"NVIDIA_DRIVER_CAPABILITIES=(\S+)", dict(steps)["ENV"])
    assert set(capabilities[0].split(",")) >= {"compute", "utility"}
    for file in (ROOT / "cluster.yaml", *DEPLOY.glob("*.yaml")):  # none takes it away
        assert (
            "NVIDIA_DRIVER_CAPABILITIES" not in file.read_text()
            and "capabilities=" not in file.read_text()
        )
    assert (
        "HOME=/home/ray " in dict(steps)["ENV"]
        and "RAYPIPE_CACHE=/home/ray/cache " in dict(steps)["ENV"]
    )
    last_user = [arguments for name, arguments in steps if name == "USER"][-1]
    assert last_user == "1000"


def test_the_image_ray_and_the_manifests_agree_on_versions(
    kuberay: dict[str, dict[str, Any]],
) -> None:
    pins = (DEPLOY / "constraints.txt").read_text().splitlines()  # tests/test_pins.py
    assert f"ray=={kuberay['RayCluster']['spec']['rayVersion']}" in pins
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    image = f"raypipe:{version}"
    assert {load(path)["docker"]["image"] for path in RAY_UP} == {image}
    containers = [
        group["template"]["spec"]["containers"][0]
        for group in groups_of(kuberay["RayCluster"])
    ]
    assert {container["image"] for container in containers} == {image}
