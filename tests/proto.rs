//! The protobuf descriptor: its marks for secret fields and for limits on numbers.
//!
//! `csi/` walks the same descriptor to keep secrets out of its logs. This file checks that the
//! marks are there.

use prost_reflect::{DescriptorPool, Kind};

fn pool() -> DescriptorPool {
    DescriptorPool::decode(baggageclaim::proto::DESCRIPTOR).expect("the descriptor decodes")
}

#[test]
fn every_field_called_secrets_is_marked_and_no_other() {
    let pool = pool();
    let mark = pool
        .get_extension_by_name("csi.v1.csi_secret")
        .expect("the option is declared");
    let mut marked = 0;
    for message in pool.all_messages().filter(|m| m.package_name() == "csi.v1") {
        for field in message.fields() {
            let secret = field.options().get_extension(&mark).as_bool() == Some(true);
            assert_eq!(secret, field.name() == "secrets", "{}", field.full_name());
            marked += usize::from(secret);
        }
    }
    assert_eq!(marked, 20);
}

#[test]
fn every_method_of_csi_has_a_label_for_its_count() {
    let pool = pool();
    let services = pool.services().filter(|s| s.package_name() == "csi.v1");
    let methods =
        services.flat_map(|s| s.methods().map(|m| m.name().to_owned()).collect::<Vec<_>>());
    let mut methods: Vec<String> = methods.collect();
    methods.sort();
    methods.dedup();
    assert_eq!(methods, baggageclaim::csi::METHODS);
}

#[test]
fn numbers_of_the_removed_volume_condition_stay_reserved() {
    let pool = pool();
    for (message, number) in [
        ("csi.v1.NodeGetVolumeStatsResponse", 2),
        ("csi.v1.ListVolumesResponse.VolumeStatus", 2),
        ("csi.v1.ControllerGetVolumeResponse.VolumeStatus", 2),
    ] {
        let message = pool.get_message_by_name(message).expect("it exists");
        assert!(
            message
                .reserved_ranges()
                .any(|range| range.contains(&number))
        );
    }
    for (name, number) in [
        ("csi.v1.NodeServiceCapability.RPC.Type", 4),
        ("csi.v1.ControllerServiceCapability.RPC.Type", 11),
    ] {
        let numbers = pool.get_enum_by_name(name).expect("it exists");
        assert!(
            numbers
                .reserved_ranges()
                .any(|range| range.contains(&number))
        );
    }
}

#[test]
fn a_finding_can_name_a_file_whose_name_is_not_text() {
    let finding = pool()
        .get_message_by_name("baggageclaim.admin.v1.Finding")
        .expect("it exists");
    let path = finding.get_field_by_name("path").expect("it exists");
    assert_eq!(path.kind(), Kind::Bytes);
}
