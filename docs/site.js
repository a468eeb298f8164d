// A long name in a table goes on in the next line after one of its own separators, never in the middle of a word.
for (const code of document.querySelectorAll("td code")) {
  for (const text of [...code.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE)) {
    const parts = text.data.split(/(?<=[_.,/(=])(?=[^_.,/(=\s])/);
    text.replaceWith(...parts.flatMap((part, index) => index ? [document.createElement("wbr"), part] : [part]));
  }
}
