//! A disk with a volatile write cache, served to qemu as a network block device over a unix socket
//! (the protocol's doc/proto.md). Writes are visible at once, but durable only after a flush.
//!
//! When the machine is killed, its disk loses power: any part of the unflushed writes may survive.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::facts::Random;
use super::log_writes::Disk;

const GREETING: u64 = 0x4e42_444d_4147_4943; // "NBDMAGIC"
const OPTION: u64 = 0x4948_4156_454f_5054; // "IHAVEOPT"
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const REQUEST: u32 = 0x2560_9513;
const REPLY: u32 = 0x6744_6698;
/// Fixed newstyle, without zeroes at the end.
const HANDSHAKE: u16 = 3;
const OPT_ABORT: u32 = 2;
const OPT_GO: u32 = 7;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const REP_UNSUPPORTED: u32 = 0x8000_0001;
/// Flags are there; flushes are understood.
const TRANSMISSION: u16 = 1 | 4;
const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const FLUSH: u16 = 3;
const EINVAL: u32 = 22;

#[derive(Debug, Default)]
struct State {
    durable: Disk,
    /// As the machine sees it.
    seen: Disk,
    /// Written since the last flush, in order.
    cached: Vec<(u64, Vec<u8>)>,
}

/// The disk.
#[derive(Debug)]
pub(crate) struct VolatileDisk {
    socket: PathBuf,
    state: Arc<Mutex<State>>,
}

impl VolatileDisk {
    /// A new, empty disk of a size, served at `socket` for as long as this process lives.
    pub(crate) fn serve(socket: &Path, size: u64) -> io::Result<Self> {
        let listener = UnixListener::bind(socket)?;
        let state = Arc::new(Mutex::new(State::default()));
        let served = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { return };
                // A machine that is killed hangs up in the middle of anything.
                let _how_it_ended = serve(stream, size, &served);
            }
        });
        Ok(Self {
            socket: socket.to_owned(),
            state,
        })
    }

    /// The argument of qemu's `-drive`.
    pub(crate) fn drive(&self) -> String {
        format!(
            "if=virtio,format=raw,file=nbd+unix:///?socket={}",
            self.socket.display()
        )
    }

    /// Loses power: how many writes it had not made durable, and how many of these are there.
    pub(crate) fn lose_power(&self, random: &mut Random) -> (usize, usize) {
        let mut state = self.state.lock().expect("no server panicked");
        let cached = std::mem::take(&mut state.cached);
        let all = cached.len();
        // All, none, or any.
        let chance = [0, 100, 50, 85][usize::try_from(random.below(4)).expect("four")];
        let mut kept = 0;
        for (at, bytes) in cached {
            if random.below(100) < chance {
                kept += 1;
                state.durable.write(at, &bytes);
            }
        }
        state.seen = state.durable.clone();
        (all, kept)
    }
}

fn serve(mut stream: UnixStream, size: u64, state: &Mutex<State>) -> io::Result<()> {
    stream.write_all(&GREETING.to_be_bytes())?;
    stream.write_all(&OPTION.to_be_bytes())?;
    stream.write_all(&HANDSHAKE.to_be_bytes())?;
    let _client_flags: [u8; 4] = read(&mut stream)?;
    loop {
        let _magic: [u8; 8] = read(&mut stream)?;
        let option = u32::from_be_bytes(read(&mut stream)?);
        let length = u32::from_be_bytes(read(&mut stream)?);
        let mut data = vec![0; usize::try_from(length).expect("32 bits")];
        stream.read_exact(&mut data)?;
        let mut reply = |kind: u32, data: &[u8]| {
            let mut message = OPTION_REPLY.to_be_bytes().to_vec();
            message.extend(option.to_be_bytes());
            message.extend(kind.to_be_bytes());
            message.extend(u32::try_from(data.len()).expect("short").to_be_bytes());
            message.extend(data);
            stream.write_all(&message)
        };
        match option {
            OPT_GO => {
                let mut export = 0_u16.to_be_bytes().to_vec();
                export.extend(size.to_be_bytes());
                export.extend(TRANSMISSION.to_be_bytes());
                reply(REP_INFO, &export)?;
                reply(REP_ACK, &[])?;
                break;
            }
            OPT_ABORT => return reply(REP_ACK, &[]),
            _ => reply(REP_UNSUPPORTED, &[])?,
        }
    }
    loop {
        let magic = u32::from_be_bytes(read(&mut stream)?);
        if magic != REQUEST {
            return Err(io::Error::other("no request"));
        }
        let _flags: [u8; 2] = read(&mut stream)?;
        let kind = u16::from_be_bytes(read(&mut stream)?);
        let handle: [u8; 8] = read(&mut stream)?;
        let at = u64::from_be_bytes(read(&mut stream)?);
        let length = u32::from_be_bytes(read(&mut stream)?);
        let mut data = vec![0; usize::try_from(length).expect("32 bits")];
        if kind == WRITE {
            stream.read_exact(&mut data)?;
        }
        let mut error = 0;
        {
            let mut state = state.lock().expect("no server panicked");
            match kind {
                READ => state.seen.read(at, &mut data),
                WRITE => {
                    state.seen.write(at, &data);
                    state.cached.push((at, std::mem::take(&mut data)));
                }
                FLUSH => {
                    for (at, bytes) in std::mem::take(&mut state.cached) {
                        state.durable.write(at, &bytes);
                    }
                }
                DISCONNECT => return Ok(()),
                _ => error = EINVAL,
            }
        }
        let mut message = REPLY.to_be_bytes().to_vec();
        message.extend(error.to_be_bytes());
        message.extend(handle);
        if kind == READ {
            message.extend(data);
        }
        stream.write_all(&message)?;
    }
}

fn read<const LENGTH: usize>(stream: &mut UnixStream) -> io::Result<[u8; LENGTH]> {
    let mut bytes = [0; LENGTH];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}
