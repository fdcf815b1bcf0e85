//! The product shown at work on one machine: a pipeline of steps over the real socket.
//!
//! This is the top floor. It may use every other room and none may use it: what it needs from the driver it
//! asks for as an orchestrator would, through [`kubelet`].

pub mod kubelet;
