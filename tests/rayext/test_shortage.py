from __future__ import annotations

import pytest

from raypipe.config import PoolConfig
from raypipe.errors import ResourceError
from raypipe.rayext.shortage import check_own, too_few_cpus


def test_trainers_of_ones_own_loop_count_and_the_message_names_every_setting_that_would_mend_it() -> None:
    check_own(3, 2, 1.0, PoolConfig())
    with pytest.raises(ResourceError) as caught:
        check_own(2, 2, 1.0, PoolConfig())
    assert str(caught.value) == (
        "2 trainers and 1 transform actor need 3 CPUs (2 x 1 + 1 x 1); the cluster has, or can scale to, 2: set "
        'ScalingConfig(num_workers=1) or ScalingConfig(resources_per_worker={"CPU": 0.5}) or pool.engine=inline, '
        "or add CPU nodes"
    )
    check_own(2, 1, 1.0, PoolConfig())
    check_own(2, 2, 0.5, PoolConfig())
    check_own(2, 2, 1.0, PoolConfig(engine="inline"))


@pytest.mark.parametrize(("gpus", "mend"), [(1, "num_workers=1"), (0, "use_gpu=False")])
def test_trainers_of_ones_own_loop_that_want_more_gpus_than_there_are_are_told(gpus: int, mend: str) -> None:
    check_own(1, 2, 0.0, PoolConfig(), 2, 1.0)
    with pytest.raises(ResourceError, match=rf"2 trainers of 1 GPU each need 2 GPUs; .* {gpus}: .*\({mend}\)"):
        check_own(1, 2, 0.0, PoolConfig(), gpus, 1.0)


@pytest.mark.parametrize("name", ["min_actors", "executions", "cpus_per_actor"])
def test_each_setting_of_the_pool_that_is_named_would_mend_it_alone(name: str) -> None:
    pool = {"executions": 4, "min_actors": 2, "cpus_per_actor": 1.0}
    said = str(too_few_cpus(8, 2, 2.0, PoolConfig(**pool), []))  # type: ignore[arg-type]
    value = float(said.partition(f"pool.{name}=")[2].split()[0].rstrip(","))
    mended = {**pool, name: value if name == "cpus_per_actor" else int(value)}
    assert 2 * 2.0 + mended["executions"] * mended["min_actors"] * mended["cpus_per_actor"] <= 8
