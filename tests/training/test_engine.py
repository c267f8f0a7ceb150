"""Engines of real ranks: restored bit for bit, rebuilt without a leak, refused in one line."""

import pytest

FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
UNTESTED = {"zero_allow_untested_optimizer": True}

CASES = {
    "zero0 fp32": {"stage": 0, "bf16": False},
    "zero0 fp32 gas2": {"stage": 0, "bf16": False, "gas": 2},
    "zero0 bf16": {"stage": 0},
    "zero1": {"stage": 1},
    "zero1 gas2": {"stage": 1, "gas": 2},
    "zero2": {"stage": 2},
    "zero2 gas2": {"stage": 2, "gas": 2},
    "zero3": {"stage": 3},
    "zero3 gas2": {"stage": 3, "gas": 2},
    "zero3 zero.Init": {"stage": 3, "zero_init": True},
    "zero2 fp32": {"stage": 2, "bf16": False},
    "zero3 fp32": {"stage": 3, "bf16": False},
    "zero1 fp32 gradients (BF16_Optimizer)": {"stage": 1, "gas": 2, "config": FP32_GRADIENTS},
    "zero0 fp16": {"stage": 0, "fp16": True},
    "zero2 fp16": {"stage": 2, "fp16": True, "gas": 2},
    "zero3 fp16": {"stage": 3, "fp16": True},
    "zero0 sgd": {"stage": 0, "optimizer": "SGD", "bf16": False},
    "zero1 sgd momentum": {"stage": 1, "optimizer": "SGD", "params": {"momentum": 0.9}, "config": UNTESTED},
    "zero3 sgd momentum": {"stage": 3, "optimizer": "SGD", "params": {"momentum": 0.9}, "config": UNTESTED},
    "zero1 adagrad": {"stage": 1, "optimizer": "Adagrad", "config": UNTESTED},
    "zero0 client functions": {"stage": 0, "client": True, "bf16": False},
    "zero2 client functions": {"stage": 2, "client": True},
    "zero3 client functions": {"stage": 3, "client": True},
    "zero2 unmanaged accumulation": {"stage": 2, "config": {"managed_gradient_accumulation": False}},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_restored_engine_continues_bit_for_bit(zygote, case):
    """From steps 0 and 2; in the same engine, in rebuilt ones, and in a standby that only rehearsed."""
    answers = zygote.run("rollback", processes=4, **case)
    if case.get("fp16") and case["stage"]:
        assert answers[0]["skipped"] > 0, "no overflow: the loss scale was not put to the test"


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_rebuilding_leaves_nothing_behind(zygote, stage):
    for answer in zygote.run("cycles", stage=stage, cycles=15):
        seen = answer["seen"]
        assert {(one["fds"], one["threads"], one["engines"]) for one in seen[1:]} == {
            (seen[1]["fds"], seen[1]["threads"], 1)
        }
        assert seen[-1]["rss"] < 1.05 * seen[1]["rss"]
        assert answer["linear"] == "linear", "ZeRO-3's torch.nn.functional.linear outlives its engine"


def test_a_zygote_has_one_thread_and_its_children_import_next_to_nothing(zygote):
    assert zygote.born == {"threads": 1, "before": 1, "cuda": False}
    for stage in (0, 1, 3):
        (answer,) = zygote.run("first_build", processes=1, stage=stage)
        assert len(answer["new"]) < 30, answer["new"]


@pytest.mark.parametrize("where", ["optimizer", "scheduler"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_after_a_failed_build_the_next_one_is_as_the_first(zygote, stage, where):
    zygote.run("failed_build", stage=stage, where=where)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_build_equals_the_weights_of_all_ranks_unless_they_will_be_loaded(zygote, stage):
    left, equalled = zip(*(answer["weights"] for answer in zygote.run("unequal", stage=stage)), strict=True)
    assert (len(set(left)), len(set(equalled))) == (3, 1)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_rehearsal_leaves_the_model_as_it_was(zygote, stage):
    zygote.run("rehearsal_undone", processes=1, stage=stage)


def test_a_state_that_does_not_fit_is_refused(zygote):
    for answer in zygote.run("misfit", stage=2):
        assert set(answer["answers"].values()) == {"CheckpointError"}, answer["answers"]
        assert answer["scalar_bytes"] < 4000


def test_deepspeeds_own_arguments_are_accepted(zygote, tmp_path):
    (answer,) = zygote.run("accepted", processes=1, stage=1, file=str(tmp_path / "ds.json"))
    assert answer["stage"] == [1, 3]
    assert answer["sizes"] == [2, 4]


REFUSED = {
    "top key": ({"gradient_cliping": 1.0}, "UnknownConfigKey", "'gradient_clipping'"),
    "zero key": ({"zero_optimization": {"overlapcomm": True}}, "UnknownConfigKey", "'overlap_comm'"),
    "bf16 key": ({"bf16": {"enable": True}}, "UnknownConfigKey", "'enabled'"),
    "optimizer key": ({"optimizer": {"parms": {}}}, "UnknownConfigKey", "'params'"),
    "optimizer type": ({"optimizer": {"type": "AdamWW"}}, "UnknownConfigKey", "AdamW"),
    "scheduler type": ({"scheduler": {"type": "WarmupLr2"}}, "UnknownConfigKey", "WarmupLR"),
    "block": ({"bf16": True}, "ConfigError", "not a block"),
    "stage": ({"zero_optimization": {"stage": 7}}, "ConfigError", "stage"),
    "removed": ({"elasticity": {"enabled": True}}, "ConfigError", "elasticity"),
    "both": ({"fp16": {"enabled": True}}, "ConfigError", "simultaneously"),
    "no batch": (
        {"train_batch_size": "remove", "train_micro_batch_size_per_gpu": "remove"},
        "ConfigError",
        "Set train",
    ),
    "offload": (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        "ConfigError",
        "offload_optimizer",
    ),
    "zenflow": ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "ConfigError", "zenflow"),
    "hpz": ({"zero_optimization": {"zero_hpz_partition_size": 2}}, "ConfigError", "zero_hpz_partition_size"),
    "lamb": ({"optimizer": {"type": "Lamb"}}, "ConfigError", "lamb"),
    "muon": ({"optimizer": {"type": "Muon"}}, "ConfigError", "muon"),
    "tensor parallel": ({"tensor_parallel": {"autotp_size": 2}}, "ConfigError", "tensor_parallel"),
    "deepcompile": ({"compile": {"deepcompile": True}}, "ConfigError", "compile"),
    "data efficiency": ({"data_efficiency": {"enabled": True}}, "ConfigError", "data_efficiency"),
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "ConfigError", "autocast"),
    "factory": ({"stage": 3}, "NeedsModelFactory", "build_model"),
    "optimizer instance": ({}, "ConfigError", "optimizer=lambda params"),
    "optimizer number": ({}, "ConfigError", "Pass a function"),
    "scheduler instance": ({}, "ConfigError", "lr_scheduler=lambda optimizer"),
    "data": ({}, "ConfigError", "job.steps"),
    "mpu": ({}, "ConfigError", "mpu"),
    "unknown argument": ({}, "ConfigError", "modle"),
    "no model": ({}, "ConfigError", "model is NoneType"),
    "parameters of no model": ({}, "ConfigError", "lambda model"),
    "moe": ({}, "ConfigError", "MoE"),
    "missing file": ({}, "ConfigError", "no file"),
}


def test_what_cannot_work_is_refused_in_one_line_that_says_what_to_do(zygote):
    cases = {name: change for name, (change, _, _) in REFUSED.items()}
    (answer,) = zygote.run("refused", processes=1, cases=cases)
    for name, (_, kind, word) in REFUSED.items():
        got = answer["answers"][name]
        assert got is not None, f"{name} was accepted"
        assert got[0] == kind, (name, got)
        assert word in got[1], (name, got)
        assert "\n" not in got[1], (name, got)
