"""A task in other trainers: checkpoints contain only the task, and a stopped run resumes exactly."""

import warnings

import lightning.pytorch as lightning
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from tiny import tiny
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from bitgraft import Config, Network, TaskModel, TrainingError
from bitgraft.training.lightning import TaskCallback as LightningTask
from bitgraft.training.transformers import TaskCallback as TrainerTask

BERT = transformers.BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
)


@pytest.fixture(autouse=True)
def ignore_warnings_of_trainers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Flowers(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, index):
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.model.optimizer()


class StopAt(lightning.Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *given):
        if trainer.global_step == self.step:
            trainer.should_stop = True


def with_lightning(file, folder, stop=None, resume=None):
    net = Network(tiny())
    net.add_task("flowers", classes=3)
    model = TaskModel(net, "flowers")
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(16, 3, 8, 8), torch.arange(16) % 3)
    callbacks = [LightningTask(model, file), StopAt(stop), ModelCheckpoint(folder, save_last=True)]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", callbacks=callbacks, **quiet)
    trainer.fit(Flowers(model), DataLoader(data, batch_size=4), ckpt_path=resume)
    return net


def test_lightning_writes_the_task_and_resumes_to_the_same_file(tmp_path):
    net = with_lightning(tmp_path / "whole.safetensors", tmp_path / "whole")
    assert not any(parameter.requires_grad for parameter in net.tasks["flowers"].parameters())
    held = torch.load(tmp_path / "whole/last.ckpt", weights_only=True)["state_dict"]
    assert held
    assert all(name.startswith("model.task.") for name in held)
    with_lightning(tmp_path / "part.safetensors", tmp_path / "part", stop=4)
    assert (tmp_path / "part.safetensors").read_bytes() != (tmp_path / "whole.safetensors").read_bytes()
    with_lightning(tmp_path / "part.safetensors", tmp_path / "part", resume=tmp_path / "part/last.ckpt")
    assert (tmp_path / "part.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    fresh = Network(tiny())
    fresh.load_task(tmp_path / "whole.safetensors")


class StopTrainer(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **given):
        control.should_training_stop = state.global_step == self.step


def with_trainer(file, folder, stop=None, resume=None):
    torch.manual_seed(0)
    net = Network(transformers.BertForSequenceClassification(BERT))
    net.add_task("mood", classes=["bad", "good"])
    model = TaskModel(net, "mood")
    data = [{"input_ids": torch.arange(8) + 20 * (i % 2), "labels": i % 2} for i in range(8)]
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    args = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=2,
        save_steps=3,
        remove_unused_columns=False,
        label_names=["labels"],
        **quiet,
    )
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=data,
        callbacks=[TrainerTask(model, file), StopTrainer(stop)],
        optimizers=(model.optimizer(), None),
    )
    trainer.train(resume_from_checkpoint=resume)


def test_the_trainer_writes_the_task_and_resumes_to_the_same_file(tmp_path):
    with_trainer(tmp_path / "whole.safetensors", tmp_path / "whole")
    with_trainer(tmp_path / "part.safetensors", tmp_path / "part", stop=3)
    assert (tmp_path / "part.safetensors").read_bytes() != (tmp_path / "whole.safetensors").read_bytes()
    with_trainer(tmp_path / "part.safetensors", tmp_path / "part", resume=True)
    assert (tmp_path / "part.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert all(name.startswith("task.") for name in load_file(tmp_path / "whole/checkpoint-3/model.safetensors"))


def test_masks_anneal_and_the_network_moves_along():
    net = Network(tiny())
    task = net.add_task("flowers", classes=3)
    model = TaskModel(net, "flowers", Config(anneal_masks=0.5))
    first = next(iter(task.transforms.values()))
    model.before_step(0, 8)
    assert first.hardness == 0.25
    model.before_step(4, 8)
    assert first.hardness == 1
    assert {id(p) for p in model.parameters()} == {id(p) for p in task.parameters()}
    model.to(torch.float64)
    assert net.backbone.fc.weight.dtype == torch.float64


def test_methods_with_several_phases_are_refused():
    net = Network(tiny())
    net.add_task("flowers", classes=3, method="packnet")
    with pytest.raises(TrainingError, match=r"use bitgraft\.fit"):
        TaskModel(net, "flowers")
