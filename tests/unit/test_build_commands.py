from tfdist.build import commands


def test_setup_py_sees_the_tools_first_and_no_stray_settings():
    inherited = {
        "PATH": "/usr/bin",
        "PYTHONPATH": "/mine",
        "HOME": "/home/me",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
    }
    assert commands.tool_environment(inherited, "/work/tools") == {
        "PATH": "/work/tools/bin:/usr/bin",
        "PYTHONPATH": "/work/tools:/mine",
        "HOME": "/home/me",
        "PIP_NO_INPUT": "1",
    }
    assert commands.tool_environment({"PATH": "/usr/bin"}, None) == {
        "PATH": "/usr/bin",
        "PIP_NO_INPUT": "1",
    }


def test_every_command_is_this_pythons_pip():
    pip = ["/venv/bin/python", "-m", "pip", "--disable-pip-version-check"]
    python = pip[0]
    for command in (
        commands.tools_command(python, ("wheel",), "/t"),
        commands.download_command(python, "/t"),
        commands.wheel_command(python, "/s", "/t"),
        commands.install_command(python, "/w.whl"),
        commands.runtime_command(python, ("psutil",)),
    ):
        assert command[:4] == pip
    assert commands.download_command(python, "/t")[-1] == "horovod==0.28.1"
    # Horovod's setup.py has to see this environment's TensorFlow, and pip must not fetch another.
    for command in (
        commands.download_command(python, "/t"),
        commands.wheel_command(python, "/s", "/t"),
    ):
        assert {"--no-build-isolation", "--no-deps"} <= set(command)
    assert "--no-deps" in commands.install_command(python, "/w.whl")
