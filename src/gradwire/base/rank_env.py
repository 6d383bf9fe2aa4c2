"""The rank of this process, from a distributed command's flags or torchrun's environment. Free of torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import Field

from gradwire.base.errors import BadInput
from gradwire.base.flags import PORT, RANK, RANKS, SECONDS, Number
from gradwire.base.strict import Strict

Backend = Literal["auto", "nccl", "gloo"]
Device = Literal["auto", "cpu", "cuda"]
BACKENDS: tuple[str, ...] = get_args(Backend)
DEVICES: tuple[str, ...] = get_args(Device)
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"  # number of ranks on this machine; set by torchrun
MASTER_PORT = 29500  # torch's default
TIMEOUT = 60.0  # seconds for startup and for each collective


class RankEnv(NamedTuple):
    """The rank of one process; ``master_port`` is None for a single process."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int | None = None


class RankEnvOptions(Strict):
    """Flags that set this process's rank."""

    group: ClassVar = ("ranks", "for ranks started by hand; `gradwire launch` and torchrun set them")

    world_size: Annotated[int, RANKS] | None = Field(None, description="number of ranks (default: 1)")
    rank: Annotated[int, RANK] | None = Field(None, description="rank of this process, from 0")
    local_rank: Annotated[int, RANK] | None = Field(
        None, description="index of its GPU on this machine (default: the rank)"
    )
    master_addr: str | None = Field(None, description="address of rank 0 (default: 127.0.0.1)")
    master_port: Annotated[int, PORT] | None = Field(
        None, description=f"port of rank 0 (default, with several ranks: {MASTER_PORT})"
    )
    timeout: Annotated[float, SECONDS] = Field(TIMEOUT, description="seconds to wait for other ranks")


class RankOptions(RankEnvOptions):
    """Flags that :func:`rank_options` reads."""

    backend: Backend = Field("auto", description="auto: nccl with a GPU per rank, else gloo")
    device: Device = Field("auto", description="auto: cuda with a GPU, else cpu")


def rank_options(options: Any) -> dict[str, Any]:
    """Keyword arguments for :func:`gradwire.comm.collectives.world.process_group` from a command's options.

    Raises:
        BadInput: If the flags disagree with torchrun's environment, are incomplete or out of range.
    """
    given = {name: getattr(options, name) for name in RankEnv._fields}
    here = rank_env(given, os.environ)
    return {"backend": options.backend, "device": options.device, "here": here, "timeout": options.timeout}


def rank_env(given: Mapping[str, Any], environment: Mapping[str, str]) -> RankEnv:
    """Determine this process's rank from torchrun's environment, else from ``given``, else as a single process.

    Args:
        given: Values by the names of :class:`RankEnv`'s fields; None or missing if unset.
        environment: The process's environment variables.

    Raises:
        BadInput: If the two disagree, or either is incomplete.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    if "RANK" in environment:
        return _from_environment(chosen, environment)
    env = RankEnv(**{"local_rank": chosen.get("rank", 0), **chosen})
    if env.world_size > 1 and "rank" not in chosen:
        raise BadInput(
            f"--world_size {env.world_size} without --rank: "
            f"start the ranks with `gradwire launch --world_size {env.world_size} -- COMMAND ...`, or pass it to each."
        )
    if not 0 <= env.rank < env.world_size:
        raise BadInput(
            f"--rank {env.rank} with --world_size {env.world_size}: the rank must be from 0 to world_size - 1."
        )
    return env._replace(master_port=MASTER_PORT) if env.world_size > 1 and env.master_port is None else env


def ranks_here(world_size: int) -> int:
    """Number of ranks on this machine, from torchrun or the launcher, else all ranks.

    Raises:
        BadInput: If the environment variable is not a number of ranks.
    """
    return variable(os.environ, LOCAL_WORLD_SIZE, RANKS) if LOCAL_WORLD_SIZE in os.environ else world_size


def variable(environment: Mapping[str, str], name: str, kind: Number) -> int:
    """Read an integer from an environment variable.

    Raises:
        BadInput: If it is not an integer or is out of bounds.
        KeyError: If it is not set.
    """
    try:
        value = int(environment[name])
    except ValueError:
        raise BadInput(f"{name} in the environment is {environment[name]!r}; it must be an integer.") from None
    kind.check(f"{name} in the environment", value)
    return value


def is_loopback(address: str) -> bool:
    """Whether an address can only be reached from this machine."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _from_environment(chosen: Mapping[str, Any], environment: Mapping[str, str]) -> RankEnv:
    """Read torchrun's variables and check that no flag contradicts them."""
    try:
        env = RankEnv(
            rank=variable(environment, "RANK", RANK),
            local_rank=variable(environment, "LOCAL_RANK", RANK),
            world_size=variable(environment, "WORLD_SIZE", RANKS),
            master_addr=environment["MASTER_ADDR"],
            master_port=variable(environment, "MASTER_PORT", PORT),
        )
    except KeyError as missing:
        raise BadInput(f"RANK is set in the environment but {missing} is not: set all five, or none.") from None
    if env.rank >= env.world_size:
        raise BadInput(
            f"RANK is {env.rank} and WORLD_SIZE is {env.world_size} in the environment; RANK must be less than "
            "WORLD_SIZE."
        )
    for name, value in chosen.items():
        if value != getattr(env, name):
            raise BadInput(
                f"--{name} {value} disagrees with {name.upper()}={getattr(env, name)} in the environment, "
                f"which torchrun sets: leave --{name} out."
            )
    return env
