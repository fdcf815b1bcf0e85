//! One function per verb: ask the driver, show the answer, return the exit code.
//! `answer` has what these functions share.

use std::io;
use std::process::ExitCode;

use clap::CommandFactory as _;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::answer::{
    Done, FAILED, Failure, Listed, artifacts, now, only, print, say_none, volumes,
    wait_for_next_look,
};
use super::rows::{Cache, Row};
use super::show::{self, Reader, Thing};
use super::status as status_answer;
use super::verbs::{Caches, Check, Cli, Destroy, Inspect, List, Outcome, OutcomeWord, Plain, Verb};
use super::{RunDemo, cluster, generations, shared, transfer};
use crate::config::{self, Output};
use crate::engine::Engine;
use crate::model::{Reference, Tenant, layout};
use crate::proto::admin::v1 as admin;
use crate::sys::printable;
use crate::{
    admin as socket, api, controller, driver, link, locality, node, standalone, telemetry,
};

/// The most threads of the async runtime. Few: system calls run on the engine's own threads.
const WORKERS: usize = 4;

pub(super) fn run(verb: Verb, demo: RunDemo) -> Done {
    match verb {
        Verb::Standalone(flags) => standalone(*flags),
        Verb::Node(flags) => self::node(*flags),
        Verb::Controller(flags) => self::controller(*flags),
        Verb::Crds => crds(),
        Verb::Locality(flags) => self::locality(flags.namespace.as_str()),
        Verb::Demo(flags) => self::demo(flags, demo),
        Verb::Volumes(flags) => asking(list(flags, "volumes", volumes)),
        Verb::Artifacts(flags) => asking(list(flags, "artifacts", artifacts)),
        Verb::Caches(flags) => asking(self::caches(flags)),
        Verb::Explain(what) => asking(cluster::explain(what)),
        Verb::Clear(what) => asking(cluster::clear(what)),
        Verb::Inspect(what) => asking(inspect(what)),
        Verb::Outcome(said) => asking(outcome(said)),
        Verb::Destroy(what) => asking(destroy(what)),
        Verb::Log(what) => asking(generations::log(what)),
        Verb::Rollback(what) => asking(generations::rollback(what)),
        Verb::Export(flags) => asking(transfer::export(flags)),
        Verb::Import(flags) => asking(transfer::import(flags)),
        Verb::Reap(plain) => asking(reap(plain)),
        Verb::Check(check) => asking(self::check(check)),
        Verb::Status(plain) => asking(status(plain)),
        Verb::PeerKey(flags) => peer_key(&flags),
        Verb::Shared(flags) => shared::run(&flags),
        Verb::Completion(flags) => completion(flags.shell),
    }
}

fn standalone(flags: config::Standalone) -> Done {
    let process = flags.driver.process.clone();
    let config = flags.resolve()?;
    serve(&process, async |shutdown| {
        standalone::run(config, shutdown)
            .await
            .map_err(Failure::from)
    })
}

fn node(flags: config::Node) -> Done {
    let process = flags.driver.process.clone();
    let config = flags.resolve()?;
    serve(&process, async |shutdown| {
        node::run(config, shutdown).await.map_err(Failure::from)
    })
}

fn controller(flags: config::Controller) -> Done {
    let process = flags.process.clone();
    let config = flags.resolve()?;
    serve(&process, async |shutdown| {
        let running = Box::pin(controller::run(config, shutdown));
        running.await.map_err(Failure::from)
    })
}

/// Prints the definitions of the objects.
fn crds() -> Done {
    print(|to| to.write_all(api::definitions_text().as_bytes()))?;
    Ok(ExitCode::SUCCESS)
}

/// Prints what turns locality on.
fn locality(namespace: &str) -> Done {
    let objects = locality::objects(namespace)?;
    print(|to| writeln!(to, "{objects:#}"))?;
    Ok(ExitCode::SUCCESS)
}

/// Runs a role of the driver with its log, its runtime, and the signals that end it.
fn serve<Role>(
    process: &config::Process,
    role: impl FnOnce(WaitForCancellationFutureOwned) -> Role,
) -> Done
where
    Role: Future<Output = Result<(), Failure>>,
{
    if process.end_with_parent {
        let signal = Some(rustix::process::Signal::TERM);
        rustix::process::set_parent_process_death_signal(signal).map_err(io::Error::from)?;
    }
    telemetry::init(process.log.log_format, &process.log.log)?;
    driver::prepare_process();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let runtime = Builder::new_multi_thread()
        .worker_threads(cores.min(WORKERS))
        .enable_all()
        .build()
        .map_err(Failure::Runtime)?;
    let ended = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).map_err(Failure::Runtime)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::Runtime)?;
        let mut next = async || {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        let stop = CancellationToken::new();
        let driver = role(stop.clone().cancelled_owned());
        tokio::pin!(driver);
        tokio::select! {
            ended = &mut driver => return ended,
            () = next() => {}
        }
        stop.cancel();
        tokio::select! {
            ended = &mut driver => ended,
            () = next() => Err(Failure::Interrupted),
        }
    });
    // Late tasks were named in the log; the process does not wait for them any longer.
    runtime.shutdown_background();
    ended.map(|()| ExitCode::SUCCESS)
}

fn demo(flags: config::Demo, run: RunDemo) -> Done {
    run(flags).map_err(Failure::Demo)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs a verb that asks the driver.
fn asking(verb: impl Future<Output = Done>) -> Done {
    let runtime: Runtime = Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(Failure::Runtime)?;
    runtime.block_on(verb)
}

async fn caches(flags: Caches) -> Done {
    let Caches {
        list,
        cluster,
        controller,
    } = flags;
    if cluster {
        return cluster::caches(&list.namespace, list.output, list.watch, &controller).await;
    }
    self::list(list, "caches", async |client, tenant| {
        Ok(Cache::among(artifacts(client, tenant).await?))
    })
    .await
}

/// Shows the list that `ask` returns, and with `--watch` its changes.
async fn list<R: Row>(
    list: List,
    what: &str,
    ask: impl AsyncFn(&mut socket::Client, Option<&Tenant>) -> Listed<R>,
) -> Done {
    let mut client = socket::connect(&list.pool.pool).await?;
    let tenant = list.namespace.tenant.as_ref();
    let reader = Reader::of_stdout();
    if list.watch {
        let mut watch = show::Watch::new(list.output, reader);
        loop {
            let rows = ask(&mut client, tenant).await?;
            print(|mut to| watch.look(&mut to, rows, now()))?;
            wait_for_next_look()?;
        }
    }
    let rows = ask(&mut client, tenant).await?;
    let for_people = matches!(list.output, Output::Table | Output::Wide);
    if rows.is_empty() && for_people {
        say_none(what, tenant);
    } else {
        print(|mut to| show::list(&mut to, &rows, list.output, reader, now()))?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn inspect(what: Inspect) -> Done {
    let mut client = socket::connect(&what.pool.pool).await?;
    let tenant = what.namespace.tenant.as_ref();
    let volumes = volumes(&mut client, tenant).await?;
    let artifacts = artifacts(&mut client, tenant).await?;
    let all = volumes.iter().map(Thing::Volume);
    let all = all.chain(artifacts.iter().map(Thing::Artifact));
    let found: Vec<Thing<'_>> = all.filter(|thing| thing.is_called(&what.what)).collect();
    let thing = only(&found, &what.what)?;
    print(|mut to| show::one(&mut to, thing, what.output))?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the name of this node's key.
fn peer_key(flags: &config::PeerKey) -> Done {
    let key = link::Key::open(&flags.peer_key)?;
    print(|to| writeln!(to, "{}", key.name()))?;
    Ok(ExitCode::SUCCESS)
}

/// Prints a shell's completions.
fn completion(shell: clap_complete::Shell) -> Done {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "baggageclaim", &mut script);
    print(|to| to.write_all(&script))?;
    Ok(ExitCode::SUCCESS)
}

async fn outcome(said: Outcome) -> Done {
    let mut client = socket::connect(&said.pool.pool).await?;
    let outcome = match said.ended {
        OutcomeWord::Succeeded => admin::Outcome::Succeeded,
        OutcomeWord::Failed => admin::Outcome::Failed,
    };
    let answer = client.report_outcome(admin::ReportOutcomeRequest {
        pod_uid: said.pod_uid.to_string(),
        outcome: outcome.into(),
        wait: said.wait,
    });
    let told = answer.await?.into_inner();
    match (told.volumes, told.told_the_same, told.told_otherwise) {
        (0, 0, 0) => return Err(Failure::NoVolumes(said.pod_uid)),
        (0, 0, _) => {}
        (0, _, _) => print(|to| writeln!(to, "Already reported."))?,
        (1, _, _) => print(|to| writeln!(to, "Reported for 1 volume."))?,
        (news, _, _) => print(|to| writeln!(to, "Reported for {news} volumes."))?,
    }
    if told.told_otherwise > 0 {
        let before = match said.ended {
            OutcomeWord::Succeeded => "failed",
            OutcomeWord::Failed => "succeeded",
        };
        return Err(Failure::ToldOtherwise {
            pod: said.pod_uid,
            before,
        });
    }
    Ok(ExitCode::SUCCESS)
}

async fn destroy(what: Destroy) -> Done {
    let mut client = socket::connect(&what.pool.pool).await?;
    let tenant = what.namespace.required();
    if what.dry_run {
        return would_destroy(&mut client, &tenant, &what.reference).await;
    }
    let answer = client.destroy(admin::DestroyRequest {
        tenant: tenant.to_string(),
        reference: what.reference.to_string(),
    });
    answer.await?;
    let name = printable(&what.reference);
    print(|to| writeln!(to, "{name} of namespace {tenant} is deleted."))?;
    Ok(ExitCode::SUCCESS)
}

/// The dry run of `destroy`. Decided here: an older driver would ignore a flag and delete.
async fn would_destroy(
    client: &mut socket::Client,
    tenant: &Tenant,
    reference: &Reference,
) -> Done {
    let all = artifacts(client, Some(tenant)).await?;
    let name = reference.to_string();
    let row = all.into_iter().find(|row| row.reference == name);
    let status = client.status(admin::StatusRequest {}).await?.into_inner();
    let has_tier = status.shared.is_some();
    if row.is_none() && !has_tier {
        return Err(Failure::NothingCalled(name));
    }
    if let Some(row) = &row
        && row.in_use_by > 0
        && reference.cache().is_none()
    {
        return Err(Failure::WouldBeRefused(Box::new(row.clone())));
    }
    print(|mut to| {
        if let Some(row) = &row {
            show::destroyed(&mut to, row)?;
        } else {
            let name = printable(&name);
            writeln!(to, "{name} of namespace {tenant} is not on this node.")?;
        }
        if has_tier {
            writeln!(
                to,
                "The name would be cleared in the shared tier, if it is there."
            )?;
        }
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}

async fn reap(plain: Plain) -> Done {
    let mut client = socket::connect(&plain.pool.pool).await?;
    let reaped = client.reap(admin::ReapRequest {}).await?.into_inner();
    print(|mut to| show::reaped(&mut to, &reaped, plain.output))?;
    Ok(ExitCode::SUCCESS)
}

async fn check(check: Check) -> Done {
    let pool = &check.pool.pool;
    if check.rebuild {
        return rebuild(&check).await;
    }
    let findings = match socket::connect(pool).await {
        Ok(mut client) => {
            let answer = client.check(admin::CheckRequest {}).await?;
            answer.into_inner().findings
        }
        // The pool's lock keeps a driver from starting during the check.
        Err(socket::ClientError::NotRunning { .. }) => {
            let findings = Engine::check_offline(pool)?;
            findings.iter().map(admin::Finding::from).collect()
        }
        Err(error) => return Err(error.into()),
    };
    print(|mut to| show::findings(&mut to, &findings, check.output))?;
    Ok(if findings.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(FAILED)
    })
}

async fn rebuild(check: &Check) -> Done {
    let pool = &std::path::absolute(&check.pool.pool)?;
    match socket::connect(pool).await {
        Ok(_) => return Err(Failure::Running),
        Err(socket::ClientError::NotRunning { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    let rebuilt = if check.dry_run {
        Engine::preview_index(pool)?
    } else if !check.force && Engine::has_readable_index(pool)? {
        return Err(Failure::ReadableIndex(pool.join(layout::INDEX)));
    } else {
        Engine::rebuild_index(pool)?
    };
    print(|mut to| show::rebuilt(&mut to, pool, &rebuilt, check.dry_run))?;
    Ok(ExitCode::SUCCESS)
}

async fn status(plain: Plain) -> Done {
    let mut client = socket::connect(&plain.pool.pool).await?;
    let status = client.status(admin::StatusRequest {}).await?.into_inner();
    print(|mut to| status_answer::show(&mut to, &status, plain.output))?;
    Ok(ExitCode::SUCCESS)
}
