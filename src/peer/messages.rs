//! The messages of `proto/peer.proto` as the model's types, and back. What a peer sent is checked
//! here; digests are checked where content arrives.

use crate::archive::toc::Want;
use crate::distribution::Frozen;
use crate::distribution::roster::{Asked, AskedClone, Reader};
use crate::engine::{OpenArtifact, OpenLayer, OpenSnapshot};
use crate::model::{
    ArtifactId, Maker, Name, NodeId, OwnerView, Pod, Sha256, Sharing, Tenant, Timestamp,
};
use crate::proto::peer::v1 as wire;
use crate::shared::{FORMAT, Found, LayerRef, Manifest, NameRecord, NameState, ObjectId, Source};

/// The most layers of an artifact, and the most wants of a request.
const MOST_LAYERS: usize = 4096;
const MOST_WANTS: usize = 4096;

/// The question about a name.
pub(super) fn ask(name: &Name, reader: &Reader) -> wire::Ask {
    let Reader { tenant, pod } = reader;
    let other = (*tenant != name.tenant).then_some(tenant);
    wire::Ask {
        tenant: name.tenant.to_string(),
        reference: name.reference.to_string(),
        pod: pod.name.clone(),
        pod_uid: pod.uid.to_string(),
        pod_namespace: other.map(ToString::to_string).unwrap_or_default(),
        clone: None,
    }
}

/// The question about a snapshot.
pub(super) fn ask_clone(asked: &AskedClone) -> wire::Ask {
    wire::Ask {
        clone: Some(wire::Clone {
            volume: asked.volume.to_string(),
            snapshot: asked.snapshot.to_string(),
        }),
        ..wire::Ask::default()
    }
}

/// The snapshot that a peer asks for. The error names the field.
pub(super) fn asked_clone(clone: &wire::Clone) -> Result<AskedClone, String> {
    let volume = clone.volume.parse();
    let snapshot = clone.snapshot.parse();
    Ok(AskedClone {
        volume: volume.map_err(|error| format!("ask.clone.volume: {error}"))?,
        snapshot: snapshot.map_err(|error| format!("ask.clone.snapshot: {error}"))?,
    })
}

/// What a peer asks for. The error names the field.
pub(super) fn asked(ask: Option<wire::Ask>) -> Result<Asked, String> {
    let ask = ask.ok_or("ask is missing")?;
    let wrong = |field: &str, why: &dyn std::fmt::Display| format!("ask.{field}: {why}");
    let tenant = ask.tenant.parse();
    let tenant: Tenant = tenant.map_err(|error| wrong("tenant", &error))?;
    let reference = ask.reference.parse();
    let reader = match ask.pod_namespace.as_str() {
        "" => Ok(tenant.clone()),
        other => other.parse(),
    };
    Ok(Asked {
        reader: reader.map_err(|error| wrong("pod_namespace", &error))?,
        name: Name {
            tenant,
            reference: reference.map_err(|error| wrong("reference", &error))?,
        },
        pod: Pod {
            uid: ask
                .pod_uid
                .parse()
                .map_err(|error| wrong("pod_uid", &error))?,
            name: ask.pod,
            service_account: None,
        },
    })
}

pub(super) fn digest(bytes: &[u8]) -> Result<Sha256, String> {
    let digest = bytes.try_into().map(Sha256);
    digest.map_err(|_| "a digest has 32 bytes".to_owned())
}

fn layers(open: &[OpenLayer]) -> Vec<wire::Layer> {
    let layers = open.iter().map(|layer| wire::Layer {
        digest: layer.table.digest().sha256.to_vec(),
        content: layer.table.bytes(),
        table: layer.table.digest().bytes,
    });
    layers.collect()
}

fn layer_refs(layers: &[wire::Layer]) -> Result<Vec<LayerRef>, String> {
    if layers.len() > MOST_LAYERS {
        return Err("it has too many layers".to_owned());
    }
    let layers = layers.iter().map(|layer| {
        Ok(LayerRef {
            digest: digest(&layer.digest)?,
            // A peer publishes nothing: these are of the tier alone.
            upload: ObjectId::from_bits(0),
            bytes: 0,
            tail: 0,
            content: layer.content,
            table: layer.table,
        })
    });
    layers.collect()
}

/// A snapshot of this node, for a peer.
pub(super) fn snapshot(open: &OpenSnapshot) -> wire::Snapshot {
    let OwnerView { uid, gid } = open.snapshot.view;
    let exchange = |(on_disk, seen)| wire::Exchange { on_disk, seen };
    wire::Snapshot {
        layers: layers(&open.layers),
        capacity: open.snapshot.size,
        uid: uid.map(exchange),
        gid: gid.map(exchange),
    }
}

/// What a peer has of a snapshot, with the peer as its source.
pub(super) fn frozen(
    snapshot: &wire::Snapshot,
    source: std::sync::Arc<dyn Source>,
) -> Result<Frozen, String> {
    let pair = |exchange: wire::Exchange| (exchange.on_disk, exchange.seen);
    Ok(Frozen {
        layers: layer_refs(&snapshot.layers)?,
        size: snapshot.capacity,
        view: OwnerView {
            uid: snapshot.uid.map(pair),
            gid: snapshot.gid.map(pair),
        },
        source,
    })
}

/// An artifact of this node, for a peer.
pub(super) fn artifact(open: &OpenArtifact) -> wire::Artifact {
    let artifact = &open.artifact;
    wire::Artifact {
        id: artifact.id.to_string(),
        created_unix_ms: artifact.created.0,
        ttl_seconds: artifact.ttl_seconds,
        layers: layers(&open.layers),
        maker: artifact.made_by.as_ref().map(|maker| wire::Maker {
            pod: maker.pod.name.clone(),
            pod_uid: maker.pod.uid.to_string(),
            service_account: maker.pod.service_account.clone().unwrap_or_default(),
            images: maker.images.clone(),
            node: maker.node.clone().map(String::from).unwrap_or_default(),
        }),
        number: artifact.sharing.number,
        base: artifact.sharing.base,
        copied: artifact.sharing.copied,
        fence: artifact.fence,
    }
}

/// What a peer has under a name, in the form of the shared tier.
pub(super) fn found(name: &Name, artifact: wire::Artifact) -> Result<(Found, Sharing), String> {
    let id: ArtifactId = artifact
        .id
        .parse()
        .map_err(|error| format!("id: {error}"))?;
    if artifact.layers.is_empty() {
        return Err("it has no layers".to_owned());
    }
    let layers = layer_refs(&artifact.layers)?;
    // A peer publishes nothing: these ids are of the tier alone.
    let none = ObjectId::from_bits(0);
    let maker = artifact.maker.map(|maker| {
        let account = maker.service_account;
        let uid = maker.pod_uid.parse();
        let uid = uid.map_err(|error| format!("maker.pod_uid: {error}"))?;
        let pod = Pod {
            uid,
            name: maker.pod,
            service_account: (!account.is_empty()).then_some(account),
        };
        let made_on = NodeId::new(maker.node).ok();
        Ok::<_, String>(Maker::new(pod, maker.images, made_on))
    });
    let made = Timestamp(artifact.created_unix_ms);
    let found = Found {
        record: NameRecord {
            format: FORMAT,
            tenant: name.tenant.clone(),
            reference: name.reference.clone(),
            number: artifact.number.unwrap_or_default(),
            cleared: 0,
            evicted: false,
            deleting: false,
            write: none,
            committed: made,
            state: NameState::Content {
                artifact: id,
                publication: none,
                manifest: Sha256([0; 32]),
                ttl_seconds: artifact.ttl_seconds,
            },
        },
        manifest: Manifest {
            format: FORMAT,
            tenant: name.tenant.clone(),
            reference: name.reference.clone(),
            artifact: id,
            publication: none,
            layers,
            made,
            made_by: maker.transpose()?,
            fence: artifact.fence,
        },
    };
    let sharing = Sharing {
        number: artifact.number,
        base: artifact.base,
        copied: artifact.copied,
        ..Sharing::default()
    };
    Ok((found, sharing))
}

pub(super) fn wants(wants: &[Want]) -> Vec<wire::Want> {
    let wants = wants.iter().map(|want| match *want {
        Want::Files { first, count } => wire::Want {
            first,
            count,
            ..wire::Want::default()
        },
        Want::Part {
            file,
            offset,
            length,
        } => wire::Want {
            first: file,
            offset,
            length,
            ..wire::Want::default()
        },
    });
    wants.collect()
}

pub(super) fn wanted(wants: &[wire::Want]) -> Result<Vec<Want>, String> {
    if wants.len() > MOST_WANTS {
        return Err(format!("at most {MOST_WANTS} wants"));
    }
    let wants = wants.iter().map(|want| {
        if want.length == 0 {
            Want::Files {
                first: want.first,
                count: want.count,
            }
        } else {
            Want::Part {
                file: want.first,
                offset: want.offset,
                length: want.length,
            }
        }
    });
    Ok(wants.collect())
}
