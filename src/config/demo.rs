//! The flags of `demo`.
//! All other flags are in `config`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::common::hide_env_value;

/// The flags of `demo`.
#[derive(Debug, Clone, Args)]
#[command(mut_args(hide_env_value))]
pub struct Demo {
    /// The directory for the pool [default: a filesystem image in the temporary directory]
    #[arg(long, value_name = "DIR")]
    pub pool: Option<PathBuf>,
    /// The filesystem to make
    #[arg(
        long,
        value_name = "KIND",
        default_value = "auto",
        conflicts_with = "pool"
    )]
    pub fs: DemoFilesystem,
    /// The tree to fetch beside the sources of this project's dependencies [default: files of /usr]
    #[arg(long, value_name = "DIR")]
    pub tree: Option<PathBuf>,
    /// How many compilers may run at once [default: cargo's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub jobs: Option<u16>,
    /// Keep the pool and the log of the driver
    #[arg(long)]
    pub keep: bool,
    /// Cargo's home, with the unpacked sources [default: ~/.cargo]
    #[arg(long, value_name = "DIR", env = "CARGO_HOME")]
    pub cargo_home: Option<PathBuf>,
    /// No colours; the same as a non-empty NO_COLOR in the environment
    #[arg(long)]
    pub no_color: bool,
}

/// A filesystem that the demo can make.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DemoFilesystem {
    /// The first that this machine can make.
    Auto,
    /// ext4.
    Ext4,
    /// xfs with reflinks.
    Xfs,
    /// btrfs.
    Btrfs,
}
