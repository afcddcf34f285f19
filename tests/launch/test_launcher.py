"""`accelerate launch` and `accelerate config`, up to the command and environment of the training process."""

import builtins
import json
import sys

import pytest
import yaml

from slideformer_backend import ConfigError
from slideformer_backend.integrations import launch
from slideformer_backend.integrations.launch_request import show_one_gpu


@pytest.fixture
def lines(clean, tmp_path):
    """Parses a launch command line and returns the command and environment that it would start."""
    clean.setenv("HF_HOME", str(tmp_path))

    def call(*words, config=None):
        from accelerate.commands.launch import _validate_launch_command, launch_command_parser
        from accelerate.utils import launch as utils

        if config is not None:
            path = tmp_path / "sf.yaml"
            path.write_text(yaml.safe_dump(config))
            words = ("--config_file", str(path), *words)
        args = launch_command_parser().parse_args([*words, "train.py", "--lr", "1"])
        args, *_ = _validate_launch_command(args)
        return utils.prepare_simple_launcher_cmd_env(args)

    return call


@pytest.fixture
def autoload(clean):
    """torch will call our entry point in the child."""
    clean.setattr(launch, "reaches_child", lambda environ: True)


SECTION = {"distributed_type": "SLIDEFORMER", "slideformer_config": {"update": "immediate", "cpu_threads": 3}}


@pytest.mark.usefixtures("autoload")
class TestEnvironment:
    def test_the_yaml_section_reaches_the_child(self, lines):
        command, environ = lines(config=SECTION)
        assert command == [sys.executable, "train.py", "--lr", "1"]
        assert environ["ACCELERATE_USE_SLIDEFORMER"] == "true"
        assert json.loads(environ["SLIDEFORMER_CONFIG"]) == SECTION["slideformer_config"]

    def test_config_is_an_alias(self, lines, tmp_path):
        (tmp_path / "a.yaml").write_text(yaml.safe_dump(SECTION))
        _, environ = lines("--config", str(tmp_path / "a.yaml"))
        assert json.loads(environ["SLIDEFORMER_CONFIG"])["update"] == "immediate"

    def test_json_files_work_too(self, lines, tmp_path):
        (tmp_path / "a.json").write_text(json.dumps(SECTION))
        _, environ = lines("--config_file", str(tmp_path / "a.json"))
        assert json.loads(environ["SLIDEFORMER_CONFIG"])["cpu_threads"] == 3

    @pytest.mark.parametrize("config", [{"distributed_type": "SLIDEFORMER"}, {**SECTION, "distributed_type": "NO"}])
    def test_the_type_alone_or_the_section_alone_switch_it_on(self, lines, config):
        assert lines(config=config)[1]["ACCELERATE_USE_SLIDEFORMER"] == "true"

    def test_flags_go_over_environment_over_file(self, lines, clean):
        config = {**SECTION, "slideformer_config": {"update": "immediate", "cpu_threads": 1, "prefetch": 1}}
        clean.setenv("SLIDEFORMER_CPU_THREADS", "2")
        clean.setenv("SLIDEFORMER_PREFETCH", "2")
        _, environ = lines("--slideformer_prefetch", "3", config=config)
        assert json.loads(environ["SLIDEFORMER_CONFIG"]) == {"update": "immediate", "cpu_threads": 2, "prefetch": 3}
        left = [name for name in environ if name.startswith("SLIDEFORMER_")]
        assert left == ["SLIDEFORMER_CONFIG"]  # nothing is left that would override the merged settings in the child

    def test_a_dash_works_like_an_underscore(self, lines):
        _, environ = lines("--use-slideformer", "--slideformer-cpu-threads=5")
        assert json.loads(environ["SLIDEFORMER_CONFIG"]) == {"cpu_threads": 5}

    def test_the_environment_alone_switches_it_on(self, lines, clean):
        clean.setenv("ACCELERATE_USE_SLIDEFORMER", "true")
        assert "SLIDEFORMER_CONFIG" in lines("--num_processes", "1")[1]

    def test_without_it_nothing_is_added(self, lines):
        command, environ = lines("--num_processes", "1")
        assert command == [sys.executable, "train.py", "--lr", "1"]
        assert not [name for name in environ if "SLIDEFORMER" in name]
        assert environ["OMP_NUM_THREADS"] == "1"

    def test_the_optimizer_keeps_its_cores(self, lines):
        """Hazard: Accelerate sets OMP_NUM_THREADS to 1."""
        assert "OMP_NUM_THREADS" not in lines("--use_slideformer")[1]

    def test_a_thread_count_that_the_user_chose_stays(self, lines, clean):
        _, environ = lines("--use_slideformer", "--num_cpu_threads_per_process", "3")
        assert environ["OMP_NUM_THREADS"] == "3"
        clean.setenv("OMP_NUM_THREADS", "2")
        assert lines("--use_slideformer")[1]["OMP_NUM_THREADS"] == "2"

    def test_no_count_of_gpus_becomes_a_count_of_processes(self, lines, clean):
        """Hazard: without --num_processes, Accelerate starts one process for each GPU."""
        clean.setattr("torch.cuda.device_count", lambda: 4)
        clean.setattr("torch.cuda.is_available", lambda: True)
        _, environ = lines("--use_slideformer")
        assert environ["CUDA_VISIBLE_DEVICES"] == "0"
        assert "MASTER_ADDR" not in environ

    @pytest.mark.parametrize(
        ("chosen", "count", "shown"),
        [(None, 1, None), (None, 4, "0"), ("2,3", 2, "2"), ("3", 1, "3"), ("", 0, ""), ("GPU-a,GPU-b", 2, "GPU-a")],
    )
    def test_one_gpu_is_visible(self, chosen, count, shown):
        """Hazard: with several, Trainer wraps the model in DataParallel."""
        environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
        show_one_gpu(environ, lambda: count)
        assert environ.get("CUDA_VISIBLE_DEVICES") == shown

    def test_gpu_ids_choose_the_gpu(self, lines):
        assert lines("--use_slideformer", "--gpu_ids", "1")[1]["CUDA_VISIBLE_DEVICES"] == "1"

    def test_a_key_is_used_once_and_a_default_survives(self, lines):
        _, environ = lines("--use_slideformer", "--slideformer_update", "exact")
        assert json.loads(environ["SLIDEFORMER_CONFIG"]) == {"update": "exact"}


class TestRefusals:
    @pytest.mark.parametrize(
        ("words", "reason"),
        [
            (["--num_processes", "2"], "num_processes.*one GPU with one process.*FSDP or DeepSpeed"),
            (["--num_machines", "2", "--num_processes", "1"], "num_machines"),
            (["--multi_gpu", "--num_processes", "2"], "multi-GPU"),
            (["--use_deepspeed"], "DeepSpeed"),
            (["--use_fsdp"], "FSDP"),
            (["--use_megatron_lm"], "Megatron"),
            (["--gpu_ids", "0,1"], "gpu_ids"),
            (["--slideformer_update", "never"], "exact, immediate"),
            (["--slideformer_state_dtype", "bf16"], "state_dtype: this part of SlideFormer is not built yet"),
        ],
    )
    @pytest.mark.parametrize("config", [None, {"distributed_type": "SLIDEFORMER"}])
    def test_what_cannot_go_together(self, lines, words, reason, config):
        switch = ["--use_slideformer"] if config is None else []
        with pytest.raises(ConfigError, match=reason):
            lines(*switch, *words, config=config)

    @pytest.mark.parametrize(
        ("config", "reason"),
        [
            ({"num_processes": 4}, "num_processes"),
            ({"num_machines": 2}, "num_machines"),
            ({"gpu_ids": "0,1"}, "gpu_ids"),
            ({"distributed_type": "MULTI_GPU", "num_processes": 2}, "MULTI_GPU contradict"),
            ({"distributed_type": "DEEPSPEED", "num_processes": 1}, "DEEPSPEED contradict"),
            ({"deepspeed_config": {"zero_stage": 3}}, "deepspeed_config contradict"),
            ({"fsdp_config": {"fsdp_version": 2}}, "fsdp_config contradict"),
            ({"slideformer_config": {"updat": "exact"}}, "unknown key 'updat'.*did you mean 'update'"),
            ({"slideformer_config": {"update": "x"}}, "exact, immediate"),
            ({"slideformer_config": {"state_dtype": "int8"}}, "state_dtype: this part"),
            ({"slideformer_config": ["update"]}, "section of keys"),
        ],
    )
    def test_a_wrong_file(self, lines, config, reason):
        with pytest.raises(ConfigError, match=reason):
            lines(config={**SECTION, **config})

    def test_an_unknown_key_of_accelerate_is_still_its_own_error(self, lines):
        with pytest.raises(ValueError, match="unknown keys"):
            lines(config={**SECTION, "slideformer": 1})

    def test_a_config_file_of_many_processes_with_our_flag(self, lines):
        with pytest.raises(ConfigError, match="multi-GPU"):
            lines("--use_slideformer", config={"distributed_type": "MULTI_GPU", "num_processes": 8})

    def test_a_key_without_slideformer_is_not_ignored(self, lines):
        with pytest.raises(ConfigError, match="--slideformer_update has no effect.*--use_slideformer"):
            lines("--slideformer_update", "exact", "--num_processes", "1")

    def test_an_unknown_flag_names_the_nearest(self, lines, capsys):
        with pytest.raises(SystemExit):
            lines("--use_slideformer", "--slideformer-updte=exact")
        assert "did you mean 'update'?" in capsys.readouterr().err

    def test_before_another_strategy_asks_for_its_package(self, clean):
        """DeepSpeed is not installed here; the reason that users see must still be ours."""
        from accelerate.commands.launch import _validate_launch_command, launch_command_parser

        args = launch_command_parser().parse_args(["--use_slideformer", "--use_deepspeed", "train.py"])
        with pytest.raises(ConfigError, match="DeepSpeed"):
            _validate_launch_command(args)

    def test_other_launchers_refuse_as_well(self, clean):
        """`python -m accelerate.commands.launch` runs as ``__main__``, out of reach of the first check."""
        from accelerate.utils import launch as utils

        args = launch.argparse.Namespace(use_slideformer=True, multi_gpu=True)
        for prepare in (utils.prepare_multi_gpu_env, utils.prepare_deepspeed_cmd_env):
            with pytest.raises(ConfigError, match="multi-GPU"):
                prepare(args)


class TestAutoloadOff:
    """Without the entry point the child must be started through the runner; else it trains without SlideFormer."""

    @pytest.mark.parametrize(
        ("words", "command"),
        [
            ([], [sys.executable, "-m", "slideformer_backend.run", "train.py", "--lr", "1"]),
            (["--module"], [sys.executable, "-m", "slideformer_backend.run", "-m", "train.py", "--lr", "1"]),
        ],
    )
    def test_the_command_goes_through_the_runner(self, lines, clean, words, command):
        clean.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        assert lines("--use_slideformer", *words)[0] == command

    def test_a_program_that_is_no_python_script_cannot_be_reached(self, lines, clean):
        clean.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        with pytest.raises(ConfigError, match="--no_python"):
            lines("--use_slideformer", "--no_python")

    def test_neither_when_the_package_is_used_without_being_installed(self, clean):
        clean.setattr("importlib.metadata.entry_points", lambda group: ())
        assert not launch.reaches_child({})
        assert not launch.reaches_child({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})


class TestConfigCommand:
    def test_update_keeps_the_section(self, clean, tmp_path):
        from accelerate.commands.config.update import update_config

        path = tmp_path / "sf.yaml"
        path.write_text(yaml.safe_dump({**SECTION, "mixed_precision": "bf16"}))
        for _ in range(2):
            update_config(launch.argparse.Namespace(config_file=str(path)))
            again = yaml.safe_load(path.read_text())
            assert again["distributed_type"] == "SLIDEFORMER"
            assert again["slideformer_config"] == SECTION["slideformer_config"]
            assert again["mixed_precision"] == "bf16"
            assert again["num_processes"] == 1

    def test_a_plain_config_is_written_as_ever(self, clean, tmp_path):
        from accelerate.commands.config.update import update_config

        path = tmp_path / "plain.yaml"
        path.write_text("distributed_type: 'NO'\n")
        update_config(launch.argparse.Namespace(config_file=str(path)))
        assert yaml.safe_load(path.read_text())["distributed_type"] == "NO"
        assert "slideformer" not in path.read_text().lower()

    @pytest.mark.parametrize(
        ("answers", "section"),
        [
            (["no"], None),
            ([""], None),
            (["yes", "", ""], {}),
            (["what", "yes", "sometimes", "immediate", "4"], {"update": "immediate", "cpu_threads": 4}),
        ],
    )
    def test_the_questionnaire_has_a_branch(self, clean, tmp_path, answers, section):
        import accelerate.commands.config.config as command
        from accelerate.commands.config.config_args import ClusterConfig

        from slideformer_backend.integrations import hooks

        def stock():
            return ClusterConfig("LOCAL_MACHINE", "NO", "no", False, False, num_processes=1)

        hooks.uninstall()
        clean.setattr(command, "get_cluster_input", stock)
        hooks.install()
        given = iter(answers)
        clean.setattr(builtins, "input", lambda question: next(given))
        config = command.get_cluster_input()
        assert next(given, None) is None
        config.to_yaml_file(str(tmp_path / "made.yaml"))
        assert yaml.safe_load((tmp_path / "made.yaml").read_text()).get("slideformer_config") == section


def test_the_command_line_is_frozen(clean):
    """Flags are an interface: a change here is a change for users."""
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    parser.parse_known_args(["x.py"])
    ours = {option for option in parser._option_string_actions if "slideformer" in option and "-" not in option[2:]}
    keys = "update nonfinite cpu_threads prefetch pin_memory status gpu_memory host_memory recompute activations "
    keys += "kernels lazy_logits weights optimizer_states nvme_path nvme_fraction strategy lsp state_dtype trace report"
    assert ours == {"--use_slideformer", *(f"--slideformer_{key}" for key in keys.split())}
    assert "--config" in parser._option_string_actions
