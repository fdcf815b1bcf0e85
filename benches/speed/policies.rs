//! Publishes on a node of a cluster with cache policies: what 1,000 policies add, and whether
//! content that a pod may not read takes another time than content that does not exist. The
//! policies are those that the node has kept in its pool; there is no controller.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::time::Duration;

use baggageclaim::kubelet_double::Pod;
use baggageclaim::proto::admin::v1 as api;
use serde_json::{Value, json};

use crate::cases::{Bench, make_files, micros};
use crate::cluster::ApiServer;
use crate::driver::Driver;
use crate::nodes::until;
use crate::table::{Goal, median};

/// How many policies there are, in the pod's namespace alone and of other namespaces.
const POLICIES: usize = 1_000;
/// The namespace that a pod of `bench` may not read.
const OTHER: &str = "bench-other";

/// The policies of so many namespaces, as a node keeps them. The first one is the pods', and has
/// as many rules, each from a policy of its own.
fn kept(count: usize) -> String {
    let rule = |names: [String; 2]| json!({"names": names, "commit": ["default"], "read": []});
    let rules = (0..count).map(|number| {
        rule([
            format!("task-cache/policy-{number}"),
            format!("task-cache/prefix-{number}-*"),
        ])
    });
    let own: Vec<Value> = rules.collect();
    let mut namespaces = BTreeMap::from([("bench".to_owned(), json!({"rules": own}))]);
    for number in 1..count {
        let rules = json!({"rules": [rule(["task-cache/*".to_owned(), "artifact/*".to_owned()])]});
        namespaces.insert(format!("namespace-{number}"), rules);
    }
    json!({"format": 1, "namespaces": namespaces}).to_string()
}

impl Bench<'_> {
    /// All rows of policies.
    pub async fn policies(&mut self) {
        let dir = self.lab.run_dir();
        let mut drivers = Vec::new();
        // The names are part of the paths of sockets, which have at most 107 bytes.
        for (node, count) in [("none", 0), ("many", POLICIES)] {
            let server = ApiServer::start(&dir, node);
            let pool = self.lab.dir(node);
            fs::write(pool.join("policies.json"), kept(count)).expect("write");
            let port = TcpListener::bind("127.0.0.1:0").expect("a port");
            let address = port.local_addr().expect("an address").to_string();
            drop(port);
            // A volume without content asks its peers, of which there are none.
            let flags = ["--cluster=on", "--peer-listen", &address, "--input-wait=0s"];
            let driver = Driver::node(self.lab, node, server.kubeconfig(), &flags);
            drivers.push(driver.await);
        }
        let mut drivers: [Driver; 2] = drivers.try_into().unwrap_or_else(|_| unreachable!());
        for driver in &mut drivers {
            for key in ["policy-7", "plain"] {
                let cache = [("type", "task-cache"), ("key", key), ("commit", "always")];
                driver.seal(&cache, |dir| make_files(dir, 1)).await;
                let name = format!("task-cache/{key}");
                until(driver, &name, |row| row.durable).await;
            }
        }
        for (key, what) in [("policy-7", "a selected name"), ("plain", "another name")] {
            let reads = [("type", "task-cache"), ("key", key)];
            let [without, with] = self.discarded_in_turns(&mut drivers, &reads).await;
            let name = format!("publish of {what}, what {POLICIES} policies add");
            self.row(&name, "us", with - without, None, Goal::AtMost(10.0));
            let name = format!("publish of {what} with {POLICIES} policies");
            self.row(&name, "us", with, Some(without), Goal::None);
        }
        self.unreadable(&mut drivers[1]).await;
        drivers.into_iter().for_each(Driver::stop);
    }

    /// Publishes by both drivers in turn, of volumes that may be committed and are not.
    async fn discarded_in_turns(
        &self,
        drivers: &mut [Driver; 2],
        attributes: &[(&str, &str)],
    ) -> [f64; 2] {
        let mut medians = [const { Vec::new() }; 2];
        for _ in 0..self.plan.rounds {
            let mut took = [const { Vec::new() }; 2];
            for number in 0..self.plan.turn {
                for place in [number % 2, 1 - number % 2] {
                    let pod = drivers[place].pod();
                    took[place].push(discarded(&mut drivers[place], &pod, attributes).await);
                }
            }
            for (took, medians) in took.into_iter().zip(&mut medians) {
                medians.push(median(took));
            }
        }
        medians.map(median)
    }

    /// Publishes of a cache that another namespace has, and of one that it has not.
    async fn unreadable(&mut self, driver: &mut Driver) {
        let pod = driver.kubelet.pod(OTHER, "maker");
        let cache = [
            ("type", "task-cache"),
            ("key", "there"),
            ("commit", "always"),
        ];
        driver.seal_as(&pod, &cache, |dir| make_files(dir, 1)).await;
        until(driver, "task-cache/there", |row| row.durable).await;
        let mut times: [Vec<f64>; 2] = Default::default();
        for number in 0..self.plan.turn * 10 {
            for place in [number % 2, 1 - number % 2] {
                let key = ["there", "none"][place];
                let attributes = [
                    ("type", "task-cache"),
                    ("key", key),
                    ("fromNamespace", OTHER),
                ];
                let pod = driver.pod();
                times[place].push(discarded(driver, &pod, &attributes).await);
            }
        }
        let [there, none] = times.map(median);
        let difference = (there - none).abs() / none * 100.0;
        let name = "publish of a cache that may not be read, against one that does not exist";
        self.row(name, "us", there, Some(none), Goal::None);
        let name = "the difference of these two";
        self.row(name, "%", difference, None, Goal::AtMost(2.0));
    }
}

/// Publishes a volume and discards it; the time of the publish.
async fn discarded(driver: &mut Driver, pod: &Pod, attributes: &[(&str, &str)]) -> f64 {
    let (_, took): (_, Duration) = driver.publish(pod, attributes);
    driver.outcome(pod, api::Outcome::Failed, false).await;
    driver.unpublish(pod);
    driver.outcome(pod, api::Outcome::Failed, true).await;
    driver.reap().await;
    micros(took)
}
