//! POSIX ACLs: the kernel's attribute (posix_acl_xattr.h) and the text that tar streams carry
//! (acl_to_text(3)), with numeric ids. The kernel interprets and checks ACLs.

use super::pax;

const VERSION: u32 = 2;
const UNDEFINED: u32 = u32::MAX;
/// Each kind of entry: its tag, its word, and whether it names a user or group.
const KINDS: [(u16, &str, bool); 6] = [
    (0x01, "user", false),
    (0x02, "user", true),
    (0x04, "group", false),
    (0x08, "group", true),
    (0x10, "mask", false),
    (0x20, "other", false),
];

/// The attribute as text; `None`: it is none that this knows.
pub(super) fn to_text(value: &[u8]) -> Option<String> {
    let entries = value.strip_prefix(&VERSION.to_le_bytes())?;
    let (entries, []) = entries.as_chunks::<8>() else {
        return None;
    };
    let mut words = Vec::with_capacity(entries.len());
    for &[t0, t1, p0, p1, i0, i1, i2, i3] in entries {
        let (tag, permissions) = (u16::from_le_bytes([t0, t1]), u16::from_le_bytes([p0, p1]));
        let (_, word, named) = KINDS.iter().find(|kind| kind.0 == tag)?;
        let who = if *named {
            u32::from_le_bytes([i0, i1, i2, i3]).to_string()
        } else {
            String::new()
        };
        if permissions > 7 {
            return None;
        }
        let bit = |bit: u16, letter| if permissions & bit == 0 { '-' } else { letter };
        let (r, w, x) = (bit(4, 'r'), bit(2, 'w'), bit(1, 'x'));
        words.push(format!("{word}:{who}:{r}{w}{x}"));
    }
    Some(words.join(","))
}

/// The text as attribute; or why not.
pub(super) fn from_text(text: &[u8]) -> Result<Vec<u8>, &'static str> {
    const BAD: &str = "its ACL has an unknown form";
    let text = std::str::from_utf8(text).map_err(|_| BAD)?;
    let mut entries = Vec::new();
    for line in text.split([',', '\n']) {
        // Behind a `#` stands what an entry comes to with the mask.
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let mut parts = line.split(':');
        let mut part = || parts.next().ok_or(BAD);
        let (word, who, permissions) = (part()?, part()?.trim(), part()?.trim());
        // star writes the number behind the name.
        let number = part().ok().unwrap_or(who);
        let word = match word {
            "u" => "user",
            "g" => "group",
            "m" => "mask",
            "o" => "other",
            word => word,
        };
        let named = !who.is_empty();
        let kind = KINDS.iter().find(|kind| (kind.1, kind.2) == (word, named));
        let (tag, ..) = kind.ok_or(BAD)?;
        let id = if named {
            let number = pax::parse_number(number.as_bytes());
            let id = number.and_then(|number| u32::try_from(number).ok());
            id.ok_or("its ACL names a user or group and gives no number")?
        } else {
            UNDEFINED
        };
        let mut bits = 0_u16;
        for letter in permissions.chars() {
            bits |= match letter {
                'r' => 4,
                'w' => 2,
                'x' => 1,
                '-' => 0,
                _ => return Err(BAD),
            };
        }
        entries.push((*tag, id, bits));
    }
    if entries.is_empty() {
        return Err(BAD);
    }
    entries.sort_unstable();
    let mut value = VERSION.to_le_bytes().to_vec();
    for (tag, id, bits) in entries {
        value.extend_from_slice(&tag.to_le_bytes());
        value.extend_from_slice(&bits.to_le_bytes());
        value.extend_from_slice(&id.to_le_bytes());
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_attribute_say_the_same() {
        let text =
            "user::rwx,user:0:r--,user:4294967294:-w-,group::r-x,group:7:---,mask::rwx,other::--x";
        let value = from_text(text.as_bytes()).expect("it is one");
        assert_eq!(to_text(&value).as_deref(), Some(text));
        let other_forms = "other::--x\nu::rwx\t#effective:r--\nm::rwx\nuser:joe:r--:0\ng::r-x\n\
             group:7:---\nuser:4294967294:w\n";
        assert_eq!(from_text(other_forms.as_bytes()).as_ref(), Ok(&value));
    }

    #[test]
    fn what_is_no_acl_is_told() {
        for bad in [
            "",
            "user",
            "user::",
            "user::rwz",
            "user:joe:rwx",
            "mask:1:rwx",
            "nobody::rwx",
            "user:99999999999:r--",
            "\u{e9}::",
        ] {
            if bad == "user::" {
                // No permissions at all.
                assert!(from_text(bad.as_bytes()).is_ok());
                continue;
            }
            from_text(bad.as_bytes()).expect_err(bad);
        }
        assert_eq!(to_text(b""), None);
        assert_eq!(to_text(&[2, 0, 0, 0, 1]), None);
        assert_eq!(to_text(&[3, 0, 0, 0]), None);
    }
}
