import json

from sonde.stats import library
from sonde.version import VERSION


def test_the_version_alone_is_one_line(sonde):
    assert sonde("version").stdout == f"sonde {VERSION}\n"
    assert json.loads(sonde("version", "--json").stdout) == {"sonde": VERSION}


def test_the_self_check_names_packages_kernels_and_hooks(sonde):
    facts = json.loads(sonde("version", "--verbose", "--json").stdout)
    packages = {each["name"]: each for each in facts["packages"]}
    assert packages["numpy"]["installed"]
    assert packages["torch"]["extra"] == "torch"
    assert len(packages) == len(facts["packages"])
    assert "cockpit-for-pytorch" not in packages  # the benchmarks' own
    assert [each["part"] for each in facts["kernels"]] == [
        "statistics on the CPU",
        "module outputs",
        "statistics on CUDA devices",
    ]
    told = sonde("version", "--verbose").stdout
    assert "statistics on the CPU" in told
    assert packages["numpy"]["installed"] in told


def test_a_fallback_is_explained(sonde, monkeypatch, tmp_path):
    monkeypatch.setenv("SONDE_OUTPUTS", "python")
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    told = sonde("version", "--verbose").stdout
    assert "SONDE_OUTPUTS=python" in told
    assert "Python hooks: SONDE_OUTPUTS=python is set" in told
    assert "torch operations: the C library was not built: there was no C compiler when Sonde was installed" in told


def test_a_library_of_another_machine_is_explained(sonde, monkeypatch, tmp_path):
    (tmp_path / "_native.abi3.so").write_bytes(b"not a library")
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    assert "torch operations: the C library cannot be loaded (" in sonde("version", "--verbose").stdout


def test_a_choice_of_the_user_is_explained(sonde, monkeypatch):
    monkeypatch.setenv("SONDE_KERNEL", "torch")
    assert "torch operations: SONDE_KERNEL=torch is set" in sonde("version", "-v").stdout
