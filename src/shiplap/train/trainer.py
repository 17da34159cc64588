"""One rank's training run: join, set up, loop."""

import time
from dataclasses import dataclass

from shiplap.config import TrainConfig
from shiplap.dist import GlobalEnv, RankLayout
from shiplap.dist.agreement import fail_together
from shiplap.dist.hooks import ExposedTime
from shiplap.inspection.site_table import site_table
from shiplap.inspection.sites import sites_of_run
from shiplap.models.decoder import DecoderModel
from shiplap.optim import build_adamw
from shiplap.parallel import apply
from shiplap.train.files import open_reports
from shiplap.train.folders import claim_run_folder, claim_save_folders
from shiplap.train.model import describe, make_model, save_what_is_due
from shiplap.train.reports import Report, StepRecord
from shiplap.train.setup import Setup, joined_run, set_up, with_plan
from shiplap.train.step import Batch, TrainStep, read_together
from shiplap.train.validation import prompt_of, sample, text_of, validation_loss
from shiplap.tuning.run import conditions_of, note


def train(family: str, config: TrainConfig) -> None:
    """Train a model, as one rank of the job in whose `joined_world` this is called, or as a single process.

    Args:
        family: a key of `shiplap.families.FAMILIES`.
        config: the run.

    Raises:
        AgreedError: on every rank, if any finds a mistake in what was asked for.
    """
    with joined_run(family, config) as env:
        with fail_together():
            setup = set_up(family, config, layout=env.layout, data_parallel_rank=env.data_rank)
        setup = with_plan(setup, env)
        # Only now: a run that some rank cannot begin leaves no folder behind.
        with fail_together():
            if env.rank == 0:
                claim_save_folders(config)
            folder = claim_run_folder(config.run.run_dir, family) if env.rank == 0 else None
        model = make_model(setup, env)
        take_step = new_step(setup, model, env)
        reports: list[Report] = []
        if folder is not None:
            headline = f"{env.overview()}\n{describe(setup, model)}\n"
            headline += f"{_overlap_table(model, setup, env.layout)}run folder: {folder}"
            reports = open_reports(setup, folder, layout=env.layout, headline=headline)
        try:
            _Run(setup=setup, env=env, model=model, take_step=take_step, reports=reports).loop()
        finally:
            for report in reports:
                report.close()


def _overlap_table(model: DecoderModel, setup: Setup, layout: RankLayout) -> str:
    """What the model's layers communicate, a line for each kind and site; nothing where one rank does everything."""
    if setup.config.parallel.tensor_parallel_size == 1:
        return ""
    table = site_table(sites_of_run(model, setup.config)) + "\n"
    if setup.plan is None:
        return table
    return table + note(setup.plan, conditions_of(setup.config, layout)) + "\n"


def new_step(setup: Setup, model: DecoderModel, env: GlobalEnv) -> TrainStep:
    """What takes the steps of a run, with a new optimizer."""
    options = setup.config.optimizer
    return TrainStep(
        model=model,
        replica=apply(model, env, recompute=setup.config.model.recompute),
        optimizer=build_adamw(model, options, fused=env.device.type == "cuda"),
        options=options,
        dtype=setup.config.run.dtype,
        balance_coefficient=setup.model.router_aux_loss_coefficient,
        env=env,
        exposed=ExposedTime(env.device),
    )


def read_step(setup: Setup, step: int, env: GlobalEnv) -> list[Batch]:
    """This rank's data for step `step`, counted from 0."""
    train_batch, count = setup.data.batches.train_batch, setup.num_micro_batches
    return read_together(lambda: [train_batch(step, number) for number in range(count)], env.group("dp"))


@dataclass(frozen=True, kw_only=True)
class _Run:
    setup: Setup
    env: GlobalEnv
    model: DecoderModel
    take_step: TrainStep
    reports: list[Report]

    def loop(self) -> None:
        """All steps, with validation losses and samples between them."""
        for step in range(self.setup.config.optimizer.num_iteration):
            started = time.perf_counter()
            result = self.take_step(step, read_step(self.setup, step, self.env))
            seconds = time.perf_counter() - started
            exposed = result.exposed_tp_comm_ms
            percent = None if exposed is None else 0.1 * exposed / seconds
            record = StepRecord(
                step=step + 1,
                train_loss=result.loss,
                learning_rate=result.learning_rate,
                grad_norm=result.grad_norm,
                step_ms=1000 * seconds,
                tokens_per_s=self.setup.tokens_per_step / seconds,
                exposed_tp_comm_ms=exposed,
                exposed_tp_comm_percent=percent,
                balance_loss=result.balance_loss,
                tokens_per_expert=result.tokens_per_expert,
            )
            for report in self.reports:
                report.on_step(record)
            self._between_steps(step + 1)
        for report in self.reports:
            report.on_success()

    def _between_steps(self, num_done: int) -> None:
        """Whatever is due after this many steps; after the last one, everything that is on."""
        options = self.setup.config.run
        is_last = num_done == self.setup.config.optimizer.num_iteration

        def is_due(every: int) -> bool:
            return every > 0 and (is_last or num_done % every == 0)

        if is_due(options.val_loss_every):
            loss = validation_loss(
                self.model,
                self.setup.data.batches,
                num_batches=options.val_num_batches,
                dtype=options.dtype,
                env=self.env,
            )
            for report in self.reports:
                report.on_validation(num_done, loss)
        # One replica is enough; all of its TP ranks must take part.
        if is_due(options.sample_every) and self.env.is_in_first_replica:
            text = self._sample()
            for report in self.reports:
                report.on_sample(num_done, text)
        for folder in save_what_is_due(self.setup, self.model, num_done, env=self.env):
            for report in self.reports:
                report.on_save(num_done, folder)

    def _sample(self) -> str:
        options, tokenizer = self.setup.config.run, self.setup.data.tokenizer
        tokens = sample(
            self.model,
            prompt_of(tokenizer),
            num_tokens=options.sample_num_tokens,
            max_sequence_length=self.setup.model.max_sequence_length,
            seed=options.seed,
            group=self.env.group("tp"),
        )
        return text_of(tokens, tokenizer)
