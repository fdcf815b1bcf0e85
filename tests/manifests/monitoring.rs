//! The dashboard and the alerts ask for metrics and labels that there are. docs/metrics.md is the
//! list: tests/http.rs and the unit tests of the controller's figures compare it with the code.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use serde_json::Value;

use super::root;

/// The metrics of the page, each with its labels.
fn metrics() -> BTreeMap<String, BTreeSet<String>> {
    let page = fs::read_to_string(root().join("docs/metrics.md")).expect("a page");
    let rows = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let metrics = rows.filter(|row| row.starts_with("baggageclaim_"));
    let with_labels = metrics.map(|row| {
        let (name, labels) = row
            .trim_end_matches('}')
            .split_once('{')
            .unwrap_or((row, ""));
        let labels = labels.split(',').filter(|label| !label.is_empty());
        (name.to_owned(), labels.map(str::to_owned).collect())
    });
    with_labels.collect()
}

fn read(file: &str) -> Value {
    let path = root().join("deploy/components").join(file);
    serde_saphyr::from_str(&fs::read_to_string(path).expect(file)).expect(file)
}

/// The queries of the dashboard, and the conditions of the alerts.
fn queries() -> Vec<String> {
    let dashboard = read("monitoring/dashboard.json");
    let panels = dashboard["panels"].as_array().expect("panels");
    let targets = panels
        .iter()
        .filter_map(|panel| panel["targets"].as_array());
    let shown = targets.flatten().map(|target| &target["expr"]);
    let alerts = alerts();
    let asked = alerts.iter().map(|rule| &rule["expr"]);
    let queries = shown.chain(asked).map(|it| it.as_str().expect("text"));
    queries.map(str::to_owned).collect()
}

/// The metrics that a query names, each with the labels by which it is chosen.
fn named(query: &str) -> Vec<(String, Vec<String>)> {
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut named = Vec::new();
    for (at, _) in query.match_indices("baggageclaim_") {
        let rest = &query[at..];
        let end = rest.find(|c| !is_of_name(c)).unwrap_or(rest.len());
        let chosen = rest[end..]
            .strip_prefix('{')
            .and_then(|it| it.split('}').next());
        let labels = chosen.unwrap_or_default().split(',');
        let labels = labels.filter_map(|it| it.split(['=', '!']).next());
        let labels = labels.map(str::trim).filter(|label| !label.is_empty());
        named.push((rest[..end].to_owned(), labels.map(str::to_owned).collect()));
    }
    named
}

#[test]
fn the_dashboard_and_the_alerts_ask_for_metrics_and_labels_that_there_are() {
    let metrics = metrics();
    assert!(metrics.len() > 60, "only {} were found", metrics.len());
    let queries = queries();
    assert!(queries.len() > 50, "only {} were found", queries.len());
    for query in queries {
        let named = named(&query);
        assert!(!named.is_empty(), "{query}");
        for (name, chosen) in &named {
            let parts = ["_bucket", "_sum", "_count"];
            let whole = parts.iter().find_map(|part| name.strip_suffix(part));
            let labels = metrics.get(whole.unwrap_or(name));
            let labels =
                labels.unwrap_or_else(|| panic!("{name} is not in docs/metrics.md: {query}"));
            for label in chosen {
                let is_known = label == "instance" || labels.contains(label);
                assert!(is_known, "{name} has no label {label}: {query}");
            }
        }
        // What is summed by a label needs it in one of the metrics.
        for by in query.split(" by (").skip(1) {
            let by = by.split(')').next().unwrap_or_default();
            for label in by.split(',').map(str::trim) {
                let has_it = |(name, _): &(String, Vec<String>)| {
                    let whole = name.trim_end_matches("_bucket");
                    metrics
                        .get(whole)
                        .is_some_and(|labels| labels.contains(label))
                };
                let is_known = ["instance", "le"].contains(&label) || named.iter().any(has_it);
                assert!(is_known, "no label {label}: {query}");
            }
        }
    }
}

#[test]
fn a_metric_that_there_is_not_would_be_found() {
    let query = r#"sum by (type) (rate(baggageclaim_hits_total{instance=~"$node",source="peer"}[5m]))
        / baggageclaim_ready"#;
    let hits = ["instance", "source"].map(str::to_owned).to_vec();
    let expected = [
        ("baggageclaim_hits_total".to_owned(), hits),
        ("baggageclaim_ready".to_owned(), Vec::new()),
    ];
    assert_eq!(named(query), expected);
    let metrics = metrics();
    assert!(metrics["baggageclaim_hits_total"].contains("source"));
    assert!(metrics["baggageclaim_ready"].is_empty());
    assert!(!metrics.contains_key("baggageclaim_hits"));
}

#[test]
fn grafana_finds_the_dashboard_and_each_panel_says_what_it_shows() {
    let component = read("monitoring/kustomization.yaml");
    let map = &component["configMapGenerator"][0];
    assert_eq!(map["options"]["labels"]["grafana_dashboard"], "1");
    assert_eq!(map["files"][0], "baggageclaim.json=dashboard.json");
    let text = fs::read_to_string(root().join("deploy/components/monitoring/dashboard.json"));
    let dashboard: Value = serde_json::from_str(&text.expect("a file")).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let mut ids = BTreeSet::new();
    for panel in panels {
        assert!(ids.insert(panel["id"].as_u64().expect("an id")), "{panel}");
        let at = &panel["gridPos"];
        let right = at["x"].as_u64().expect("a place") + at["w"].as_u64().expect("a width");
        assert!(right <= 24, "{panel}");
        if panel["type"] == "row" {
            continue;
        }
        assert!(
            panel["description"]
                .as_str()
                .is_some_and(|it| it.ends_with('.')),
            "{panel}"
        );
        assert_eq!(panel["datasource"]["uid"], "${datasource}", "{panel}");
    }
}

/// The alerts.
fn alerts() -> Vec<Value> {
    let rules = read("monitoring-operator/rules.yaml");
    let groups = rules["spec"]["groups"].as_array().expect("groups");
    let rules = groups.iter().filter_map(|group| group["rules"].as_array());
    rules.flatten().cloned().collect()
}

#[test]
fn every_alert_says_what_it_is_about_and_has_a_row_in_troubleshooting() {
    let page = fs::read_to_string(root().join("docs/troubleshooting.md")).expect("a page");
    let (_, table) = page
        .split_once("| alert `Baggageclaim…` |")
        .expect("a table");
    let rows = table
        .lines()
        .skip(2)
        .take_while(|line| line.starts_with('|'));
    let names = rows.filter_map(|row| row.split('|').nth(1));
    let names = names.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    let names = names.map(|name| format!("Baggageclaim{name}"));
    let alerts = alerts();
    for rule in &alerts {
        let summary = rule["annotations"]["summary"].as_str();
        assert!(summary.is_some_and(|it| it.len() > 20), "{rule}");
    }
    let alerts = alerts.iter().filter_map(|rule| rule["alert"].as_str());
    let alerts: BTreeSet<String> = alerts.map(str::to_owned).collect();
    assert_eq!(names.collect::<BTreeSet<String>>(), alerts);
}

#[test]
fn an_absent_driver_raises_an_alert_also_when_it_is_the_only_one() {
    let alerts = alerts();
    let mut away = alerts
        .iter()
        .filter(|one| one["alert"] == "BaggageclaimDriverIsAway");
    let query = away.next().expect("an alert")["expr"]
        .as_str()
        .expect("text");
    let (nodes, drivers) = query.split_once(" > ").expect("both counts");
    assert_eq!(nodes, r#"sum(baggageclaim_cluster_nodes{state="present"})"#);
    // A metric that only a driver has, and always. Without `or`, no driver at all would be no
    // number to compare with.
    let metric = named(drivers);
    let page = fs::read_to_string(root().join("docs/metrics.md")).expect("a page");
    let (_, section) = page.split_once("\n### Driver\n").expect("a section");
    let (section, _) = section.split_once("\n### ").expect("it ends");
    assert_eq!(metric.len(), 1, "{query}");
    assert!(
        section.contains(&format!("| `{}` |", metric[0].0)),
        "{query}"
    );
    assert!(
        drivers.starts_with("(count(") && drivers.ends_with(" or vector(0))"),
        "{query}"
    );
}

#[test]
fn an_absent_controller_raises_an_alert_only_where_there_was_one() {
    let alerts = alerts();
    let mut away = alerts
        .iter()
        .filter(|one| one["alert"] == "BaggageclaimControllerIsAway");
    let query = away.next().expect("an alert")["expr"]
        .as_str()
        .expect("text");
    // Without the second half, the node plugin alone would always raise it.
    let (absent, was_there) = query.split_once(" and on () ").expect("both halves");
    let metrics = [named(absent), named(was_there)].concat();
    assert!(absent.starts_with("absent(") && was_there.contains("present_over_time("));
    assert_eq!(metrics.len(), 2, "{query}");
    // Both ask for one metric, which only the controller has, and always.
    assert!(metrics[0].0.starts_with("baggageclaim_cluster_"), "{query}");
    assert_eq!(metrics[0], metrics[1]);
}
