import pytest
from jobs import job
from torchtitan.config import JobConfig

from fla_harmonic.titan.config import parse_fields
from fla_harmonic.titan.models.flavors import HARMONIC


def of_fields(family: str, fields: str) -> JobConfig:
    return job(family, f"--harmonic.config={fields}")


def test_job_changes_fields_of_its_flavor_alone() -> None:
    args = HARMONIC["debug"]
    before = args.hf_config().to_dict()
    try:
        args.update_from_config(of_fields("harmonic", "gate_rank=4 timescale_mode=init timescales=[[2,8],[100,1000.5]]"))
        changed = args.hf_config()
        assert (changed.gate_rank, changed.timescale_mode) == (4, "init")
        assert [tuple(pair) for pair in changed.timescales] == [(2, 8), (100, 1000.5)]
        assert changed.hidden_size == before["hidden_size"]
    finally:
        args.update_from_config(of_fields("harmonic", ""))
    # the next job has the flavor as it was
    assert args.hf_config().to_dict() == before


@pytest.mark.parametrize("entries", [["gate_rank"], ["=4"], ["gate rank=4"], ["gate_rank=4", "gate_rank=4"]])
def test_entry_that_is_no_field_is_refused(entries: list[str]) -> None:
    with pytest.raises(ValueError, match=r"name=value.*Remedy"):
        parse_fields(entries)


def test_field_that_the_configuration_lacks_is_refused() -> None:
    args = HARMONIC["debug"]
    try:
        with pytest.raises(ValueError, match="gate_rang"):
            args.update_from_config(of_fields("harmonic", "gate_rang=4"))
    finally:
        args.update_from_config(of_fields("harmonic", ""))


def test_fields_of_another_family_are_refused() -> None:
    from fla_harmonic.titan.models.flavors import MAMBA

    with pytest.raises(ValueError, match=r"mamba: fields of HarmonicConfig.*Remedy"):
        MAMBA["debug"].update_from_config(of_fields("mamba", "gate_rank=4"))
